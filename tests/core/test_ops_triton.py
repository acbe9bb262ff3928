"""The Triton kernels of ``nanoserve.ops``: right in the interpreter, and compiled for GPUs that are not there.

The skinny product is Gluon, which has no interpreter: its results are checked on a GPU only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from nanoserve.engine.sampler import INV_TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORM, SamplingPlan, sample_reference
from nanoserve.ops import _elementwise
from nanoserve.ops.activation import silu_and_mul_reference
from nanoserve.ops.decode_inputs import DecodeInputs, decode_inputs_reference
from nanoserve.ops.linear import Norm, linear, linear_add_, norm_linear, norm_swiglu
from nanoserve.ops.mailbox import Mailbox
from nanoserve.ops.norm import rms_norm_reference
from nanoserve.ops.sample import sample

DTYPES = [torch.float32, torch.float16]  # the interpreter rounds to bfloat16 towards zero
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def relative_error(ours, reference):
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_dtype", "dtype"), [(torch.float16, torch.float32), (torch.float32, torch.float32)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding(ids_dtype, weight_dtype, dtype):
    weight = randn(9, 96, dtype=weight_dtype)
    ids = torch.tensor([0, 8, 3, 3, 8], dtype=ids_dtype, device=DEVICE)
    for taken in (ids, ids[:0]):
        ours = _elementwise.embedding(taken, weight, dtype)
        assert ours.dtype == dtype
        assert torch.equal(ours, weight[taken.long()].to(dtype))


# -- norms, activation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 5, 128), (1030, 64)], ids=str)
def test_rms_norm(shape, dtype):
    x, weight = 30 * randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    ours = _elementwise.rms_norm(x, weight, 1e-5)
    reference = rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert ours.dtype == dtype
    assert relative_error(ours, reference) < torch.finfo(dtype).eps


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5, 1030])
def test_add_rms_norm(tokens, weight_dtype):
    """C41: fp16 weights with an fp32 residual stream beyond fp16's range; the residual is the exact sum, in place."""
    x, residual = randn(tokens, 96, dtype=weight_dtype), 1e6 * randn(tokens, 96, seed=1)
    weight = randn(96, dtype=weight_dtype, seed=2)
    total = residual + x
    ours = _elementwise.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    assert ours.dtype == weight_dtype
    if tokens:
        assert relative_error(ours, rms_norm_reference(total, weight.float(), 1e-6)) < torch.finfo(weight_dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(0, 8), (1, 8), (3, 1100), (1030, 24)])
def test_silu_and_mul(tokens, n, dtype):
    gate_up = 4 * randn(tokens, 2 * n, dtype=dtype)
    ours = _elementwise.silu_and_mul(gate_up)
    assert ours.shape == (tokens, n)
    if tokens:
        assert relative_error(ours, silu_and_mul_reference(gate_up.double())) < torch.finfo(dtype).eps


# -- decode inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 1500])
def test_decode_inputs(width):
    """C50: first and last positions of blocks, padding that shares a scratch row, no write beyond the context."""
    block_size, num_rows = 4, 9
    contexts = [1, 4, 5, 8, 13, 0, width * block_size, 0]
    rows = torch.tensor([3, 0, 7, 1, 2, 8, 5, 8])
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 1000, (num_rows, width), generator=generator).int()
    last_tokens = torch.randint(0, 500, (num_rows,), generator=generator).int()
    last_blocks = torch.arange(1000, 1000 + len(contexts)).int()
    states = []
    for function, as_taken in (
        (_elementwise.decode_inputs, lambda x: x.tensors),
        (decode_inputs_reference, lambda x: x),
    ):
        mine = table.clone().to(DEVICE)
        out = DecodeInputs.empty(len(contexts), width, torch.device(DEVICE))
        out.block_table.fill_(-7)
        step = [x.to(DEVICE, torch.int32) for x in (rows, torch.tensor(contexts), last_blocks)]
        function(*step, mine, last_tokens.to(DEVICE), block_size, as_taken(out))
        states.append([x.cpu() for x in (*out.tensors, mine)])
    assert all(map(torch.equal, *states))

    input_ids, positions, slots, block_table, after = states[0]
    expected = table.clone()
    for i, (context, row) in enumerate(zip(contexts, rows.tolist(), strict=True)):
        if context == 0:
            assert (input_ids[i], positions[i], slots[i], block_table[i, 0]) == (0, 0, -1, 0)
            assert (block_table[i, 1:] == -7).all()
            continue
        last = (context - 1) // block_size
        expected[row, last] = last_blocks[i]
        assert (input_ids[i], positions[i]) == (last_tokens[row], context - 1)
        assert slots[i] == last_blocks[i] * block_size + (context - 1) % block_size
        assert torch.equal(block_table[i, : last + 1], expected[row, : last + 1])
        assert (block_table[i, last + 1 :] == -7).all()
    assert torch.equal(after, expected)


@pytest.mark.parametrize("size", [1, 9, 2304])
def test_letters_are_taken_in_the_order_in_which_they_were_sent(size):
    """C50: one may be written before the one ahead of it is taken."""
    box = Mailbox(size, torch.device(DEVICE))

    def write(number):
        box.letter()[:size] = np.arange(number, number + size)
        box.send()

    def take_kernel():
        _elementwise.take(box._halves, box._turn, box.words, size)

    write(100)
    for number, take in zip((200, 300, 400, 500), (take_kernel, lambda: box.take(size)) * 2, strict=True):
        write(number)
        take()
        assert box.words[:size].tolist() == list(range(number - 100, number - 100 + size))


def test_a_letter_that_is_given_up_is_not_taken_for_the_next():
    box = Mailbox(3, torch.device("cpu"))
    for number, taken in enumerate((False, True, True, False)):
        box.letter()[:3] = -1
        if taken:
            box.take(3)  # and something is raised before it counts as sent
        box.letter()[:3] = number
        box.send()
        box.take(3)
        assert box.words[:3].tolist() == [number] * 3


# -- sampling ---------------------------------------------------------------------------------------------------------


def sampling(batch, vocab_size, columns):
    """``SamplingPlan.params`` of temperature 1 without restrictions, but for the ``columns`` given."""
    params = torch.tensor([1.0, 1.0, 0.0, vocab_size, 0.4])[:, None].repeat(1, batch)
    for column, values in columns.items():
        params[column] = torch.as_tensor(values, dtype=torch.float32)
    return params.to(DEVICE)


def reference_tokens(logits, params=None):
    plan = SamplingPlan(None if params is None else params.cpu(), logits.shape[1], any_min_p=True)
    return sample_reference(logits.cpu(), plan).to(DEVICE)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, 1024, 1025, 9000])
def test_sampling_equals_the_reference(vocab_size, dtype):
    """Greedy beside temperatures from nearly none to so much that all tokens are alike; ties; last_tokens, places."""
    logits = (5 * randn(24, vocab_size)).to(dtype)
    logits[3] = 0
    uniform = torch.rand(24, generator=torch.Generator().manual_seed(1))
    inv_temperature = torch.tensor([0.0, 1.0, 0.3, 1.0, 2.5, 1e30, 1e-30, 1e-3]).repeat(3)
    params = sampling(24, vocab_size, {INV_TEMPERATURE: inv_temperature, UNIFORM: uniform})
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))[:24].to(DEVICE, torch.int32)
    last_tokens = torch.full((30,), -5, dtype=torch.int32, device=DEVICE)
    placed = torch.full((30,), -5, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    ours = sample(logits, params, order, last_tokens)
    assert torch.equal(ours, reference_tokens(logits, params))
    assert torch.equal(last_tokens[order.long()].long(), ours)
    assert (last_tokens == -5).sum() == 6
    assert sample(logits, params, order, last_tokens, order, placed) is placed
    assert torch.equal(sample(logits), reference_tokens(logits))
    assert torch.equal(placed, last_tokens.long().cpu())


@pytest.mark.parametrize("seed", range(12))
def test_restricted_rows_equal_the_reference(seed):
    """top_k, top_p and min_p of all sizes, alone and together, beside rows without; peaked, flat, with ties, masked;
    candidates that fit into a list and that do not."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size, batch = (7, 1000, 2500, 6000)[seed % 4], 16

    def random():
        return torch.rand(batch, generator=generator)

    logits = torch.randn(batch, vocab_size, generator=generator) * (0.0, 0.3, 3.0)[seed % 3]  # 0: -0 among them
    if seed % 2:
        logits = (logits * 4).round().half() / 4
    if seed % 5 == 0:
        logits.masked_fill_(torch.rand(batch, vocab_size, generator=generator) < 0.9, -torch.inf)[:, 5] = 1
    logits[3, 4], logits[5] = float("nan"), -torch.inf
    params = sampling(
        batch,
        vocab_size,
        {
            INV_TEMPERATURE: [0, 1, 1, 0.5, 2, 1, 1 / 0.6, 1e-3, 1, 1, 1, 1, 1e30, 1e-30, 1, 3],
            TOP_P: torch.where(random() < 0.5, random(), 1),
            MIN_P: torch.where(random() < 0.3, random() ** 3, 0),
            TOP_K: torch.where(random() < 0.6, (random() ** 2 * vocab_size).ceil().clamp(1), vocab_size),
            UNIFORM: random().clamp(1e-6),
        },
    )
    params[TOP_K, 8] = 1
    assert sample(logits.to(DEVICE), params).tolist() == reference_tokens(logits, params).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1), (5000, 0.5), (3000, 1)])
def test_ties_are_kept_in_the_order_of_ids(top_k, top_p):
    """Also where they are spread over several tiles."""
    logits = torch.zeros(2, 6000, device=DEVICE)
    params = sampling(2, 6000, {TOP_K: top_k, TOP_P: top_p, UNIFORM: [2.0**-24, 1 - 2.0**-24]})
    assert sample(logits, params).tolist() == [0, int(top_k * top_p) - 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_restricted_rows_of_a_large_vocabulary(scale, dtype):
    """Tokens in which ours differ from the reference must have their border within rounding of the random number."""
    vocab_size, options = 151_936, [(20, 0.95, 0), (1, 1, 0), (200, 1, 0), (5000, 0.9, 0), (151_936, 0.95, 0)]
    options += [(151_936, 1, 0.05), (1000, 0.5, 0.01), (151_936, 1, 0)]
    batch = 8 * len(options)
    logits = (scale * randn(batch, vocab_size)).to(dtype)
    top_k, top_p, min_p = torch.tensor(options * 8).T
    uniform = torch.rand(batch, generator=torch.Generator().manual_seed(1)).clamp(1e-5, 1 - 1e-5)
    params = sampling(
        batch, vocab_size, {INV_TEMPERATURE: 1 / 0.6, TOP_K: top_k, TOP_P: top_p, MIN_P: min_p, UNIFORM: uniform}
    )
    ours = sample(logits, params)
    low, high = params.clone(), params.clone()
    low[UNIFORM] -= 1e-6
    high[UNIFORM] += 1e-6
    first, last = reference_tokens(logits, low), reference_tokens(logits, high)
    assert ((first <= ours) & (ours <= last)).all()


@pytest.mark.parametrize("vocab_size", [3, 1024, 3000])
def test_extreme_random_numbers_give_the_outermost_possible_tokens(vocab_size):
    """Rounding never yields a token of probability 0."""
    logits = torch.linspace(0, 1, vocab_size, device=DEVICE).repeat(2, 1)
    logits[:, [0, -1]] = -torch.inf
    if vocab_size > 1024:
        logits[:, :1024] = -torch.inf  # a whole chunk is impossible
    first = 1024 if vocab_size > 1024 else 1
    for top_k in (vocab_size, vocab_size - 1):
        params = sampling(2, vocab_size, {TOP_K: top_k, UNIFORM: [2.0**-24, 1 - 2.0**-24]})
        assert sample(logits, params).tolist() == [first, vocab_size - 2]


@pytest.mark.parametrize("random", [False, True])
def test_broken_rows_are_reported_and_harm_no_other(random):
    """C41: NaN, +inf, nothing but -inf."""
    logits = randn(6, 2500)
    params = sampling(6, 2500, {TOP_P: [1, 0.5] * 3}) if random else None
    good = sample(logits, params).tolist()
    logits[1, 2400], logits[3, 7], logits[4] = float("nan"), float("inf"), float("-inf")
    logits[5, :2000] = float("-inf")
    last_tokens, rows = torch.full((6,), 9, dtype=torch.int32, device=DEVICE), torch.arange(6, device=DEVICE).int()
    tokens = sample(logits, params, rows, last_tokens).tolist()
    assert tokens[:5] == [good[0], -1, good[2], -1, -1]
    assert tokens[5] >= 2000
    assert last_tokens.tolist() == [max(0, token) for token in tokens]


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 32, 33, 64, 65])
def test_products_of_few_tokens(tokens, dtype):
    """Every function on either side of every limit, tails of K and of the output; fp16 adds to an fp32 residual."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    for n, k in ((1000, 1032), (4096, 1024), (1024, 3072)):
        x, weight, bias = (
            randn(tokens, k, dtype=dtype),
            randn(n, k, dtype=dtype, seed=1) / k**0.5,
            randn(n, dtype=dtype, seed=2),
        )
        residual, h, norm_weight = (
            randn(tokens, n, dtype=wide),
            30 * randn(tokens, k, dtype=wide),
            randn(k, dtype=dtype, seed=3),
        )
        product = x.double() @ weight.double().T + bias.double()
        normed = rms_norm_reference(h.double(), norm_weight.double(), 1e-6) @ weight.double().T
        pairs = [
            (linear(x, weight, bias), product),
            (linear(x, weight, bias, torch.float32), product),
            (norm_linear(Norm(h, norm_weight, 1e-6), weight, bias), normed + bias.double()),
            (norm_swiglu(Norm(h, norm_weight, 1e-6), weight), silu_and_mul_reference(normed)),
            (linear_add_(residual.clone(), x, weight, bias), residual.double() + product),
            (linear_add_(residual.clone(), x, weight), residual.double() + product - bias.double()),
        ]
        for i, (ours, reference) in enumerate(pairs):
            assert relative_error(ours, reference) < torch.finfo(dtype).eps, (i, n, k)


# -- compiled ---------------------------------------------------------------------------------------------------------


def launches():
    """Name → a call that launches kernels on CPU tensors, with shapes of Qwen3-0.6B."""
    from nanoserve.ops import _skinny

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    def skinny(num_tokens, n, k, dtype=torch.bfloat16, out_dtype=None, norm=False, swiglu=False, **options):
        tile = _skinny.tile_for(num_tokens, n, k)
        out = tensor(num_tokens, n // 2 if swiglu else n, dtype=out_dtype or dtype)
        if norm:
            options["norm"] = tensor(k, dtype=dtype), 1e-6
        x, weight = tensor(num_tokens, k, dtype=dtype), tensor(n, k, dtype=dtype)
        return lambda: _skinny.skinny_linear(x, weight, out, tile, swiglu=swiglu, **options)

    fp32, int32 = torch.float32, torch.int32
    vectors = [tensor(8, dtype=int32) for _ in range(4)]
    inputs = DecodeInputs.empty(8, 2560, torch.device("cpu"))
    return {
        "embedding": lambda: _elementwise.embedding(vectors[0], tensor(512, 1024), torch.bfloat16),
        "norm": lambda: _elementwise.rms_norm(tensor(1, 1024), tensor(1024), 1e-6, tensor(1, 1024)),
        "norm of many": lambda: _elementwise.rms_norm(tensor(2048, 1024), tensor(1024), 1e-6),
        "wide norm": lambda: _elementwise.rms_norm(tensor(1, 4096), tensor(4096), 1e-6),
        "silu": lambda: _elementwise.silu_and_mul(tensor(2048, 6144)),
        "decode inputs": lambda: _elementwise.decode_inputs(
            *vectors[:3], tensor(9, 2560, dtype=int32), tensor(9, dtype=int32), 16, inputs.tensors
        ),
        "take": lambda: Mailbox(2304, torch.device("cpu")).take(2304),
        "sample": lambda: sample(
            tensor(8, 151936), tensor(5, 8, dtype=fp32), *vectors[:3], tensor(17, dtype=torch.int64)
        ),
        "sample fp32": lambda: sample(tensor(8, 151936, dtype=fp32), tensor(5, 8, dtype=fp32), *vectors[:2]),
        "qkv 1": skinny(1, 4096, 1024, norm=True),
        "o 8, bias": skinny(8, 1024, 2048, add=True, bias=tensor(1024)),
        "gate_up 8": skinny(8, 6144, 1024, norm=True, swiglu=True),
        "o 16": skinny(16, 1024, 2048, add=True),
        "down 32, fp16": skinny(32, 1024, 3072, dtype=torch.float16, out_dtype=fp32, add=True),
        "gate_up 32": skinny(32, 6144, 1024, swiglu=True),
    }


def compile_all(capability):
    """In a subprocess: a report of every kernel, with programmatic dependent launch where the GPU has it."""
    from nanoserve.ops import _skinny
    from nanoserve.ops import sample as sample_module
    from tests.helpers.triton_compile import compile_launches

    reports = {}
    for name, call in launches().items():
        pdl = mock.Mock(return_value=capability >= 90)
        with (
            mock.patch.object(Mailbox, "take", lambda box, n: _elementwise.take(box._halves, box._turn, box.words, n)),
            mock.patch.object(_elementwise, "supports_pdl", pdl),
            mock.patch.object(_skinny, "supports_pdl", pdl),
            mock.patch.object(sample_module, "supports_pdl", pdl),
        ):
            for kernel in compile_launches(call, capability):
                reports[f"{name}: {kernel}"] = {
                    "stack": kernel.stack,
                    "registers": kernel.registers,
                    "sass": kernel.sass(),
                }
    return reports


def test_embedding_is_a_full_stop(monkeypatch):
    """Later kernels of a step read positions, slots and plans before they wait: see ``_elementwise.embedding``."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append(kwargs)

    monkeypatch.setattr(_elementwise, "embedding_kernel", Kernel())
    monkeypatch.setattr(_elementwise, "supports_pdl", lambda x: True)
    _elementwise.embedding(torch.zeros(3, dtype=torch.int32), torch.zeros(5, 8), torch.float32)
    assert [launch.get("launch_pdl", False) for launch in launches] == [False]


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills(capability):
    """For the skinny products: operands come in 16-byte loads, and all weights are requested before the wait."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__, str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == 17
    for name, report in reports.items():
        assert report["stack"] == 0, name
        waits = [i for i, line in enumerate(report["sass"]) if "ACQBULK" in line]
        assert bool(waits) == (capability == 90 and not name.startswith(("embedding", "take"))), name
        if name.startswith("take"):  # from the host's memory; every thread before any of them turns to the other half
            operations = [
                ("host" if "STRONG.SYS" in line or ".CV" in line else line.split(".")[0].split()[-1])
                for line in report["sass"]
                if "LDG" in line or "BAR.SYNC" in line or "STG" in line
            ]
            assert [op for i, op in enumerate(operations) if i == 0 or operations[i - 1] != op][-3:] == [
                "host",
                "BAR",
                "STG",
            ], operations
        if "skinny" in name:
            wide = [i for i, line in enumerate(report["sass"]) if "LDG.E.128" in line]
            assert any("HMMA" in line for line in report["sass"]), name
            assert not any("LDSM" in line for line in report["sass"]), name
            assert sum(not waits or i < waits[0] for i in wide) >= 8, name


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]))))
