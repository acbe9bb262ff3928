from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.contracts.attention import AttentionContext, DecodeMetadata
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import make_case
from nanoserve_plugins.attention._kernels import GPU, WorkList, even_programs
from nanoserve_plugins.attention.paged_v2_split import PagedV2SplitBackend, PagedV2SplitConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
class TestPagedV2Split(AttentionBackendSuite):
    """Without a GPU one program would do the whole batch, every context in one piece."""

    backend = "paged_v2_split"


class TestPagedV2SplitInPieces(AttentionBackendSuite):
    """Most contexts are cut; shares up to 4 sequences, a program per piece from 5 on (INT8: from 16 on)."""

    backend = "paged_v2_split"
    options = {"num_splits": 5}

    @pytest.mark.parametrize("num_seqs", [12, 20])
    def test_large_batch(self, kv_format: str, num_seqs: int) -> None:
        """Contexts of one piece, of two, and of all pieces; scratch counters are back at 0 for the next layer."""
        context = self.make_context(kv_format)
        backend = self.build(context)
        lens = [7, 0, 33, 2, 330, 16, 90, 1, 3, 21]
        case = make_case(context, [*lens, *[0] * (num_seqs - len(lens))])
        case.plan(backend)
        assert case.meta.plan[:3] == (5, num_seqs == 20, num_seqs == 20 or kv_format != "int8")
        live = [0, *range(2, 10)]
        for _ in range(2):
            self.assert_right(case.attend(backend)[live], case.expected()[live])


@pytest.mark.parametrize(
    ("kv_format", "num_seqs", "expected"),
    [
        ("bf16", 1, (33, False, False, 3, None)),
        ("bf16", 8, (32, False, True, 3, None)),
        ("bf16", 32, (32, False, True, 3, None)),
        ("bf16", 48, (49, True, True, 3, 168)),
        ("bf16", 64, (66, True, True, 2, None)),
        ("bf16", 80, (33, False, True, 3, None)),
        ("bf16", 96, (49, True, True, 3, 168)),
        ("bf16", 256, (66, True, True, 2, None)),
        ("int8", 8, (176, False, False, 1, 176)),
        ("int8", 16, (181, True, True, 1, 176)),
        ("int8", 128, (363, True, True, 1, 176)),
    ],
)
def test_launch_on_132_multiprocessors(kv_format: str, num_seqs: int, expected: tuple[object, ...]) -> None:
    kv = SimpleNamespace(name=kv_format)
    context = AttentionContext(16, 8, 128, 1.0, torch.bfloat16, DEVICE, 16, 256, 1, 1, kv)  # type: ignore[arg-type]
    with mock.patch.object(GPU, "of", return_value=GPU(132, (9, 0))):
        backend = PagedV2SplitBackend(context, PagedV2SplitConfig())
    assert backend.launch(num_seqs) == expected


def work_list(programs: int, max_num_seqs: int) -> WorkList:
    kv = SimpleNamespace(name="bf16")
    context = AttentionContext(2, 1, 8, 1.0, torch.float32, DEVICE, 16, max_num_seqs, 1, 1, kv)  # type: ignore[arg-type]
    return WorkList(context, width=8, programs=programs)


@st.composite
def about_the_same_length(draw: st.DrawFn) -> tuple[list[int], int]:
    """Contexts, some of them 0, and a number of programs that fits them: several to a share, or several shares each."""
    longest = draw(st.integers(1, 8000))
    less = st.one_of(st.integers(0, min(40, longest - 1)), st.integers(0, longest // 8))
    context_lens = draw(st.lists(st.one_of(less.map(lambda n: longest - n), st.just(0)), min_size=1, max_size=40))
    live = max(1, sum(n > 0 for n in context_lens))
    return context_lens, draw(st.sampled_from([live * 3, live, *(-(-live // group) for group in (2, 3, 4, 5))]))


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 30)), about_the_same_length()
    ),
    st.sampled_from([16, 64]),
)
def test_plan_cuts_the_batch_evenly(batch: tuple[list[int], int], step: int) -> None:
    context_lens, programs = batch
    work = work_list(programs, max_num_seqs=40)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    work.plan(DecodeMetadata(len(lens), lens, lens, lens, (), 0), programs, step)
    total = sum(-(-n // step) for n in context_lens)
    chunk = max(1, -(-total // programs))
    shares = [tuple(row) for row in work.shares.tolist()]
    items = [tuple(row[:5]) for row in work.items[: max(stop for _, stop, *_ in shares)].tolist()]
    done = [item for begin, stop, *_ in shares for item in range(begin, stop)]
    assert done == list(range(len(items)))
    assert all(tuple(copy) == items[begin] for begin, stop, *copy, _ in shares if begin < stop)
    covered: dict[int, list[tuple[int, int]]] = {}
    for seq, start, end, first, pieces in items:
        covered.setdefault(seq, []).append((start, end))
        assert (first, pieces) == tuple(work.splits[seq].tolist())
        assert items[first][0] == items[first + pieces - 1][0] == seq
    for seq, n in enumerate(context_lens):
        spans = covered.get(seq, [])
        edges = [edge for span in spans for edge in span]
        assert edges[::2] == [0, *edges[1:-1:2]] if spans else n == 0  # pieces are adjacent and start at 0
        assert not spans or edges[-1] == n
        assert work.splits[seq, 1] == len(spans)
    loads = [sum(-(-(end - start) // step) for _, start, end, _, _ in items[begin:stop]) for begin, stop, *_ in shares]
    assert all(load <= chunk + chunk // 32 for load in loads) and sum(loads) == total
    assert [steps for begin, stop, *_, steps in shares if begin < stop] == [load for load in loads if load]


@pytest.mark.parametrize(
    ("context_lens", "programs", "items_each"),
    [
        ([1008 + i % 32 for i in range(256)], 128, 2),  # whole sequences, two to a share
        ([1055] * 32, 128, 1),  # 33 steps in four pieces
        ([1000, 1040, 0, 1020] * 2, 3, 2),  # rows of padding count for nothing
        ([1024] * 255 + [2048], 128, None),  # one is longer: even shares
    ],
)
def test_contexts_of_about_the_same_length_are_cut_alike(context_lens, programs, items_each) -> None:
    work = work_list(programs, max_num_seqs=256)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    work.plan(DecodeMetadata(len(lens), lens, lens, lens, (), 0), programs, 32)
    shares, pieces = work.shares.tolist(), work.splits[: len(lens), 1].tolist()
    live = sum(n > 0 for n in context_lens)
    if items_each is None:
        assert max(pieces) > 1 and max(share[7] for share in shares) == -(-(255 * 32 + 64) // programs)
    else:
        assert set(pieces) - {0} == {max(1, programs // live)}
        assert all(stop - begin in (0, items_each) for begin, stop, *_ in shares)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 30), st.sampled_from([16, 64]))
def test_plan_of_pieces_cuts_long_contexts_only(context_lens: list[int], programs: int, step: int) -> None:
    work = work_list(programs, max_num_seqs=40)
    work.items.fill_(-1)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    work.plan_pieces(DecodeMetadata(len(lens), lens, lens, lens, (), 0), programs, step)
    chunk = max(1, -(-sum(-(-n // step) for n in context_lens) // programs))
    items = [tuple(row[:5]) for row in work.items[: programs + len(lens)].tolist()]
    live = [item for item in items if item[1] != item[2]]
    assert items[: len(live)] == live
    longest = {seq: -(-end // step) for seq, start, end, _, _ in live if start == 0}
    assert [longest[seq] for seq, *_ in live] == sorted((longest[seq] for seq, *_ in live), reverse=True)
    for seq, n in enumerate(context_lens):
        first, pieces = work.splits[seq].tolist()
        assert [index for index, item in enumerate(live) if item[0] == seq] == list(range(first, first + pieces))
        spans = [item[1:3] for item in live[first : first + pieces]]
        assert [start for start, _ in spans] == [0, *(end for _, end in spans)][:pieces]
        assert (spans[-1][1] if spans else 0) == n
        assert all(end - start <= chunk * step and start % step == 0 for start, end in spans)
        assert all(item[3:] == (first, pieces) for item in live[first : first + pieces])
        assert pieces == 1 or -(-n // step) > chunk or n == 0


@given(st.integers(1, 400), st.integers(1, 300))
def test_even_programs_cut_equal_contexts_evenly(programs: int, num_seqs: int) -> None:
    even = even_programs(programs, num_seqs)
    assert 0.9 * programs <= even <= programs
    assert even == programs or even % num_seqs == 0 or -(-num_seqs // even) == -(-num_seqs // programs)
    assert even_programs(33, 32) == even_programs(33, 256) == 32 and even_programs(132, 256) == 128
