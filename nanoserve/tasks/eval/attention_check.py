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

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import ModelRunner

#: Largest error of a symmetric INT8 code, in steps of max|x| / 127: half a step, and what rounding the scale to fp16
#: (relative 2⁻¹¹) adds to a value of 127 steps. bf16's own rounding of the input is part of the input.
INT8_STEPS = 0.5 + 127 * 2**-11


@dataclass(frozen=True)
class Recorded:
    """One engine's answers. out: ``[batch, q_heads, head_dim]``; explicit: the same from gathered K and V; both fp32.

    recovery: the largest |stored − recovered| of any key or value, in steps of its head vector's max|x| / 127.
    """

    out: torch.Tensor
    explicit: torch.Tensor
    recovery: float


@torch.inference_mode()
def record(engine: Engine, *, batch: int = 8, context: int = 511, seed: int = 0) -> Recorded:
    """Decode attention of ``batch`` queries over ``context`` unit normal keys and values each, in layer 0's cache."""
    runner: ModelRunner = engine.runner  # type: ignore[assignment]
    kv, blocks, num_q_heads = runner.kv, engine.blocks, runner.model.num_q_heads
    shape = kv.shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, shape.head_dim, generator=generator).to(shape.device, shape.dtype)

    k, v = normal(batch * context, shape.num_kv_heads), normal(batch * context, shape.num_kv_heads)
    q = normal(batch, num_q_heads)
    sequences = [
        Sequence(f"attention-{i}", [0] * context, SamplingParams(), max_num_tokens=context + 1) for i in range(batch)
    ]
    try:
        granted = [(seq, blocks.grant(seq, context)) for seq in sequences]
        if any(n != context for _, n in granted):
            raise ValueError(f"the KV pool of {blocks.max_num_tokens} tokens cannot hold {batch} × {context}")
        blocks.take_new_rows()
        runner.rows.reserve(blocks.num_rows)
        written = runner.builder.build(Schedule(prefill=granted)).prefill  # type: ignore[arg-type]
        if written is None:
            raise ValueError("nothing was granted")
        slots, layer = written.slot_mapping, kv.layers[0]
        kv.store(layer, k, v, slots)
        last = written.cu_seqlens_k[1:].long() - 1
        meta = DecodeMetadata(
            batch, written.context_lens, written.block_table, slots[last], (context,) * batch, context
        )
        backend = runner.selector.select(
            "decode", SelectionShape(batch, batch, 1, context, kv.name, runner.compute_capability, has_prefix=True)
        )
        meta.plan = backend.plan_decode(meta)
        out = torch.empty_like(q)
        backend.decode(q, layer, meta, out)
        keys, values = (x.float() for x in kv.gather(layer, slots))
    finally:
        for seq in sequences:
            if seq.in_flight:
                blocks.commit(seq, [])
            blocks.release(seq)
    explicit = attention(q.float(), keys.unflatten(0, (batch, context)), values.unflatten(0, (batch, context)))
    recovery = max(int8_steps(x.float(), y) for x, y in ((k, keys), (v, values)))
    return Recorded(out.float(), explicit, recovery)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain softmax attention. q ``[batch, q_heads, head_dim]``, k and v ``[batch, context, kv_heads, head_dim]``."""
    grouped = q.unflatten(1, (k.shape[2], -1))  # [batch, kv_heads, group, head_dim]
    scores = torch.einsum("bhgd,bthd->bhgt", grouped, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhgt,bthd->bhgd", scores.softmax(-1), v).flatten(1, 2)


def int8_steps(stored: torch.Tensor, recovered: torch.Tensor) -> float:
    """Largest |stored − recovered| in steps of each head vector's max|x| / 127. Both ``[tokens, kv_heads, head_dim]``."""
    step = stored.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((stored - recovered).abs() / step).max().item()


def compare(base: Recorded, other: Recorded) -> dict[str, float]:
    """cosine: smallest over query heads. max_error: largest |difference| of any element of the two outputs.

    explicit_error: largest |out − explicit| / (1 + |explicit|) of ``other``: within atol = rtol = this number.
    """
    cosine = torch.cosine_similarity(base.out, other.out, dim=-1).min().item()
    return {
        "attention_cosine": cosine,
        "attention_max_error": (base.out - other.out).abs().max().item(),
        "explicit_error": ((other.out - other.explicit).abs() / (1 + other.explicit.abs())).max().item(),
        "recovery_steps": other.recovery,
    }
