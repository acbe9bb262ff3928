"""A KV format's error where it arises: attention over random keys and values, through the engine's own backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanoserve.contracts.attention import DecodeMetadata
from nanoserve.contracts.policy import SelectionShape
from nanoserve.contracts.scheduling import Schedule
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.tasks.eval.scoring import percentile

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import ModelRunner

#: Largest relative step between an fp16 scale and the number it stands for.
HALF_ULP_FP16 = 2**-11


@dataclass(frozen=True)
class Recorded:
    """One engine's answers. out: fp32 ``[draws, batch * q_heads, head_dim]``; explicit: the same from gathered K and V.

    recovery: the largest |stored − recovered| of any key or value, in steps of its head vector's max|x| / 127.
    recovery_limit: what a right INT8 format may have there: half a step, and the rounding of the largest value (127
        steps) by the fp16 scale and by the compute dtype.
    """

    out: torch.Tensor
    explicit: torch.Tensor
    recovery: float
    recovery_limit: float


@torch.inference_mode()
def record(engine: Engine, *, batch: int = 8, context: int = 511, draws: int = 6) -> Recorded:
    """Decode attention of ``batch`` queries over ``context`` unit normal keys and values each, in layer 0's cache.

    The backend is the one that the engine's policy names for this shape. The engine must be idle.
    """
    runner: ModelRunner = engine.runner  # type: ignore[assignment]
    kv, blocks, shape = runner.kv, engine.blocks, runner.kv.shape
    if engine.has_work or blocks.enable_prefix_caching:
        raise ValueError("the attention check needs an idle engine with engine.enable_prefix_caching=false")
    sequences = [
        Sequence("attention", [0] * context, SamplingParams(), max_num_tokens=context + 1) for _ in range(batch)
    ]
    try:
        granted = [(seq, blocks.grant(seq, context)) for seq in sequences]
        if any(n != context for _, n in granted):
            raise ValueError(f"the KV pool of {blocks.max_num_tokens} tokens cannot hold {batch} × {context}")
        blocks.take_new_rows()
        runner.rows.reserve(blocks.num_rows)
        written = runner.builder.build(Schedule(prefill=granted)).prefill  # type: ignore[arg-type]
        assert written is not None
        slots = written.slot_mapping
        meta = DecodeMetadata(
            num_seqs=batch,
            context_lens=written.context_lens,
            block_table=written.block_table,
            slot_mapping=slots[context - 1 :: context],
            context_lens_cpu=(context,) * batch,
            max_context_len=context,
        )
        chosen = SelectionShape(batch, batch, 1, context, kv.name, runner.compute_capability, has_prefix=True)
        backend = runner.selector.select("decode", chosen)
        outs, explicits, recovery = [], [], 0.0
        for draw in range(draws):
            generator = torch.Generator().manual_seed(draw)

            def normal(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(*size, shape.head_dim, generator=generator).to(shape.device, shape.dtype)

            k, v = (normal(batch * context, shape.num_kv_heads) for _ in range(2))
            q = normal(batch, runner.model.num_q_heads)
            kv.store(kv.layers[0], k, v, slots)
            meta.plan = backend.plan_decode(meta)
            out = torch.empty_like(q)
            backend.decode(q, kv.layers[0], meta, out)
            keys, values = (x.float() for x in kv.gather(kv.layers[0], slots))
            explicit = attention(q.float(), keys.unflatten(0, (batch, -1)), values.unflatten(0, (batch, -1)))
            outs.append(out.float().flatten(0, 1))
            explicits.append(explicit.flatten(0, 1))
            recovery = max(recovery, int8_steps(k.float(), keys), int8_steps(v.float(), values))
    finally:
        for seq in sequences:
            if seq.in_flight:
                blocks.commit(seq, [])
            blocks.release(seq)
    limit = 0.5 + 127 * (HALF_ULP_FP16 + torch.finfo(shape.dtype).eps / 2)
    return Recorded(torch.stack(outs), torch.stack(explicits), recovery, limit)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain softmax attention. q ``[batch, q_heads, head_dim]``, k and v ``[batch, context, kv_heads, head_dim]``."""
    grouped = q.unflatten(1, (k.shape[2], -1))  # [batch, kv_heads, group, head_dim]
    scores = torch.einsum("bhgd,bthd->bhgt", grouped, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhgt,bthd->bhgd", scores.softmax(-1), v).flatten(1, 2)


def int8_steps(stored: torch.Tensor, recovered: torch.Tensor) -> float:
    """Largest |stored − recovered|, in steps of its head vector's max|x| / 127; ``[tokens, kv_heads, head_dim]``."""
    step = stored.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((stored - recovered).abs() / step).max().item()


def compare(base: Recorded, other: Recorded) -> dict[str, float]:
    """cosine: of all outputs of a draw, mean over draws. max_error: the largest |difference|, median over draws.

    error_p999: 99.9th percentile of |difference| over all draws, which does not grow with the number of heads.
    explicit_error: largest |out − explicit| / (1 + |explicit|) of ``other``: within atol = rtol = this number.
    """
    error = (base.out - other.out).abs().flatten(1).double()
    cosine = torch.cosine_similarity(base.out.flatten(1).double(), other.out.flatten(1).double(), dim=1)
    return {
        "attention_cosine": cosine.mean().item(),
        "attention_max_error": error.amax(1).median().item(),
        "attention_error_p999": percentile(error, 0.999),
        "explicit_error": ((other.out - other.explicit).abs() / (1 + other.explicit.abs())).max().item(),
        "recovery_steps": other.recovery,
    }
