"""Torch reference operations against Hugging Face's modules and against float64 formulas."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanoserve.models.config import ModelConfig
from nanoserve.models.rope import build_cos_sin, inverse_frequencies
from nanoserve.ops.activation import silu_and_mul
from nanoserve.ops.linear import linear, onednn_rows
from nanoserve.ops.norm import add_rms_norm, rms_norm
from nanoserve.ops.rope import qk_norm_rope
from tests.core.test_model_config import YARN, config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def hf_cos_sin(ours: ModelConfig, scaling: dict, positions: int) -> torch.Tensor:
    hf = Qwen3Config(
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_position_embeddings,
        rope_parameters={"rope_theta": ours.rope.theta, **scaling},
    )
    cos, sin = Qwen3RotaryEmbedding(hf)(torch.zeros(1), torch.arange(positions)[None])
    half = ours.head_dim // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        YARN,
        YARN | {"factor": 8.0},
        YARN | {"attention_factor": 1.0},
        YARN | {"truncate": False},
        YARN | {"beta_fast": 16, "beta_slow": 2},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_cos_sin_table_equals_hugging_face(scaling, head_dim):
    """C39, and C03b: the table may go past max_position_embeddings (256 here)."""
    ours = config(head_dim=head_dim, rope_parameters=scaling | {"rope_theta": 1e6})
    table = build_cos_sin(ours.rope, head_dim, 600, CPU)
    assert table.shape == (600, head_dim)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, hf_cos_sin(ours, scaling, 600), atol=1e-6, rtol=0)


@pytest.mark.parametrize("factor", [4.0, 8.0])
def test_yarn_keeps_the_highest_frequency_and_divides_the_lowest(factor):
    """C39."""
    plain = inverse_frequencies(config().rope, 32)
    scaled = inverse_frequencies(config(rope_scaling=YARN | {"factor": factor}).rope, 32)
    assert scaled[0] == 1.0
    assert (scaled[-1] / plain[-1]).item() == pytest.approx(1 / factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 1, 32), (4, 2, 64), (3, 3, 128)])
def test_qk_norm_rope(q_heads, kv_heads, head_dim, dtype):
    torch.manual_seed(0)
    ours = config(head_dim=head_dim)
    table = build_cos_sin(ours.rope, head_dim, 300, CPU)
    tokens = 37
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    norms = [Qwen3RMSNorm(head_dim), Qwen3RMSNorm(head_dim)]
    for norm in norms:
        norm.weight.data = (1 + 0.3 * torch.randn(head_dim)).to(dtype)
    positions = torch.randint(0, 300, (tokens,), dtype=torch.int32)
    weights = [norm.weight.data for norm in norms]
    before = qkv.clone()
    q, k, v = qk_norm_rope(qkv, *weights, 1e-6, table, positions, q_heads, kv_heads, head_dim)

    heads = before.float().unflatten(1, (-1, head_dim))
    q_in, k_in, v_in = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    cos, sin = (x.repeat(1, 2) for x in table[positions.long()].chunk(2, dim=1))
    for norm in norms:
        norm.float()
    q_ref, k_ref = apply_rotary_pos_emb(norms[0](q_in), norms[1](k_in), cos, sin)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert (q.dtype, k.dtype) == (dtype, dtype)
    assert relative_error(q, q_ref) < tolerance
    assert relative_error(k, k_ref) < tolerance
    assert torch.equal(v, v_in.to(dtype))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_compute_in_fp32(dtype):
    """C41: against float64, the only error is the final rounding to the dtype of the weight."""
    torch.manual_seed(0)
    x, residual = (10 * torch.randn(17, 64)).to(dtype), torch.randn(17, 64).to(dtype)
    weight = (1 + 0.3 * torch.randn(64)).to(dtype)

    def reference(h: torch.Tensor) -> torch.Tensor:
        return h.double() * (h.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert relative_error(rms_norm(x, weight, 1e-6), reference(x)) < tolerance
    total = x + residual
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, total)
    assert relative_error(normed, reference(total)) < tolerance


def test_fp16_norm_of_an_fp32_residual_stream():
    """C41: values far above fp16's range come out normalised, in fp16."""
    residual = torch.randn(5, 64) * 1e6
    weight = torch.ones(64, dtype=torch.float16)
    normed, residual = add_rms_norm(torch.zeros(5, 64), residual, weight, 1e-6)
    assert (normed.dtype, residual.dtype) == (torch.float16, torch.float32)
    assert relative_error(normed, residual / residual.pow(2).mean(-1, keepdim=True).sqrt()) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype):
    gate_up = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 32).to(dtype), torch.randn(24, 32).to(dtype)
    b = torch.randn(24).to(dtype) if bias else None
    reference = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    assert relative_error(linear(x, weight, b), reference) < 2 * torch.finfo(dtype).eps


def test_the_cpu_sees_few_shapes_however_batches_vary():
    """oneDNN keeps the code of every shape: unbounded shapes made a server grow by 180 MiB in ten minutes."""
    assert len({onednn_rows(rows) for rows in range(1, 8193)}) < 100
    assert all(rows <= onednn_rows(rows) <= max(rows, rows * 9 / 8) for rows in range(1, 8193))
    weight = torch.randn(24, 16)
    for rows in (1, 17, 37, 130):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(linear(x, weight), x @ weight.t())
