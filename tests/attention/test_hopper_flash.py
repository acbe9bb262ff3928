"""The suite runs where the kernel does, on a Hopper GPU. Elsewhere its host side is tested: a reader of the same plans
in torch stands in for the kernel, so tiles, work lists, key addresses and the unpacking of INT8 pages are checked."""

import random

import numpy as np
import pytest
import torch

from nanoserve.contracts.errors import ConfigError
from nanoserve.registry import Registry
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import assert_close, make_case, make_context
from nanoserve_plugins.attention._prefill import deal, tile_records
from nanoserve_plugins.attention.hopper_flash import BLOCK_N, HopperFlashBackend, HopperFlashConfig


class TestHopperFlash(AttentionBackendSuite):
    backend = "hopper_flash"


def rows_of(descriptor):
    return torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)


def attend(programs, arguments, key, constants):
    """What ``flash_kernel`` does with its arguments, one work item after another."""
    q_tiles, k_tiles, v_tiles, out, records, rounds, table, scale = arguments
    c, table = constants(), table.flatten()
    dim, q_rows, k_rows, v_rows = c["HEAD_DIM"], *map(rows_of, (q_tiles, k_tiles, v_tiles))
    assert records.shape == (programs, rounds, 4)
    for source, row, packed, position in records.flatten(0, 1).tolist():
        num_rows, head = packed & 255, (packed >> 8) * c["HEADS"]
        for i, h in [(i, h) for i in range(num_rows) for h in range(head, head + c["HEADS"])]:
            kv_head, keys = h // c["GROUP"], torch.arange(position + i + 1)
            if c["PAGE"]:
                where = (table[source + keys // c["PAGE"]] * c["KV_HEADS"] + kv_head) * c["PAGE"] + keys % c["PAGE"]
            else:
                where = source + keys + kv_head * c["HEAD_ROWS"]
            first = 0 if c["PAGE"] or c["HEAD_ROWS"] else kv_head * dim
            k, v = (rows[where.long(), first : first + dim].double() for rows in (k_rows, v_rows))
            q = q_rows[row + i, h * dim : (h + 1) * dim].double()
            out[row + i, h] = ((k @ q * scale).mul(np.log(2)).softmax(0) @ v).to(out.dtype)


@pytest.fixture
def backend_and_case(request):
    def build(kv_format, lens, heads=(4, 2), block_size=16, kv_options=None, **options):
        spec = Registry.discover().get("kvcache", kv_format)
        context = make_context(
            spec,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=64,
            dtype=torch.float16,
            block_size=block_size,
            num_blocks=1600 // block_size,
            max_model_len=options.get("scratch_tokens", 64),
            poison_value=0.0,
            kv_options=kv_options and spec.config(**kv_options),
        )
        backend = HopperFlashBackend(context, HopperFlashConfig(**options), capability=(9, 0))
        backend.flash = attend
        backend.num_programs = 5
        return backend, make_case(context, [k for _, k in lens], [q for q, _ in lens]).fused()

    return build


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 2)], ids=["pairs of heads", "single heads", "group of 3"])
@pytest.mark.parametrize(
    "lens", [[(300, 300), (3, 3), (70, 70)], [(5, 290), (130, 130), (1, 1)]], ids=["fresh", "prefix"]
)
def test_plans_lead_to_every_key(backend_and_case, heads, lens):
    backend, case = backend_and_case("bf16", lens, heads=heads, block_size=48)
    assert_close(case.run(backend), case.expected(), 2e-3)
    assert not case.meta.plan.dense


def test_a_fresh_int8_prompt_reads_what_the_store_handed_over(backend_and_case):
    backend, case = backend_and_case("int8", [(300, 300), (3, 3), (70, 70)])
    assert_close(case.run(backend), case.expected(), 2e-3)
    assert case.meta.plan.dense


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets a kernel")
@pytest.mark.parametrize("kv_format, kv_options", [("int8", None), ("bf16", {"dtype": "bfloat16"})])
def test_pages_of_another_dtype_are_unpacked(backend_and_case, kv_format, kv_options):
    """Contexts beyond the scratch go in several launches; one longer than it would be refused by the engine."""
    lens = [(20, 290), (7, 40), (1, 90), (33, 200)]
    backend, case = backend_and_case(kv_format, lens, kv_options=kv_options, scratch_tokens=300)
    assert_close(case.run(backend), case.expected(), 2e-3)
    assert [len(group.unpack) for group in case.meta.plan.groups] == [5, 3, 4]


def test_scratch_must_hold_something(backend_and_case):
    with pytest.raises(ConfigError, match="attention.scratch_tokens must be at least 1, not 0"):
        backend_and_case("bf16", [(1, 1)], scratch_tokens=0)


def some_records(seed=0):
    rng = random.Random(seed)
    positions = np.array([rng.choice([0, rng.randint(1, 3000)]) for _ in range(20)])
    lengths = np.array([rng.randint(1, 700) for _ in range(20)])
    starts = np.cumsum(lengths) - lengths
    return lengths, positions, starts, tile_records(lengths, np.arange(20), starts, positions, 64, section=5000)


def test_tiles_cover_each_token_once_longest_first_within_sections():
    lengths, positions, starts, records = some_records()
    seen = np.zeros(lengths.sum(), int)
    for sequence, row, num_rows, position in records:
        seen[row : row + num_rows] += 1
        assert 1 <= num_rows <= 64 and position - positions[sequence] == row - starts[sequence]
    assert (seen == 1).all()
    ends = records[:, 2] + records[:, 3]
    rises = (np.diff(ends) > 0).sum()
    assert rises < (positions + lengths).sum() / 5000  # a new section may start with a longer tile, nothing else


def test_work_is_dealt_once_and_evenly():
    records = some_records()[-1]
    dealt = deal(records, head_tiles=3, programs=13)
    work = dealt.reshape(-1, 4)
    work = work[work[:, 2] > 0]
    items = {(*record, head) for record in map(tuple, records) for head in range(3)}
    assert {(s, r, n & 255, p, n >> 8) for s, r, n, p in work.tolist()} == {tuple(map(int, i)) for i in items}
    assert len(work) == len(items) and (dealt[:, :-1, 2] > 0).all()
    loads = ((dealt[:, :, 2] & 255) + dealt[:, :, 3]).sum(1)
    assert loads.max() - loads.min() < 2 * BLOCK_N + 64 + (records[:, 2] + records[:, 3]).min() * 3
    assert deal(records[:2], head_tiles=1, programs=13).shape == (2, 1, 4)
