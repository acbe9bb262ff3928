"""Every metric against a timeline computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.metrics import Objectives, RequestTimeline, better, percentile, summarise


def request(
    arrival: float,
    tokens: list[float],
    *,
    prompt: int = 10,
    scheduled: float | None = None,
    reason: str | None = "length",
) -> RequestTimeline:
    """One token at each of the times ``tokens``; the end is reported with the last."""
    end = tokens[-1] if tokens else arrival
    return RequestTimeline("x", arrival, prompt, [(t, 1) for t in tokens], scheduled, end, reason)


def test_one_request_by_hand() -> None:
    r = request(1.0, [1.5, 1.75, 2.5], scheduled=1.25)
    assert (r.ttft, r.tpot, r.itl, r.e2e) == (0.5, 0.5, [0.25, 0.75], 1.5)
    assert (r.queue, r.prefill, r.decode) == (0.25, 0.25, 1.0)
    assert r.queue + r.prefill + r.decode == r.e2e


def test_tokens_handed_over_together() -> None:
    """TPOT counts tokens, ITL counts gaps between hand-overs: no zeros that would hide the wait."""
    r = RequestTimeline("x", 0.0, 10, [(1.0, 1), (2.0, 4)], 0.0, 2.0, "stop")
    assert (r.output_len, r.tpot, r.itl) == (5, 0.25, [1.0])


def test_tpot_of_one_token_is_undefined_and_not_zero() -> None:
    one, three = request(0.0, [0.1]), request(0.0, [0.1, 0.3, 0.5])
    assert one.tpot is None and one.itl == []
    figures = summarise([one, three], Objectives())
    assert figures["TPOT count"] == 1 and figures["TPOT mean ms"] == pytest.approx(200)
    assert figures["TTFT count"] == 2
    alone = summarise([one], Objectives())
    assert alone["TPOT p50 ms"] is None and alone["ITL mean ms"] is None


def test_rates_last_from_the_first_arrival_to_the_last_end() -> None:
    figures = summarise([request(2.0, [3.0, 4.0], prompt=6), request(3.0, [5.0, 6.0], prompt=10)], Objectives())
    assert figures["duration s"] == 4.0
    assert (figures["QPS"], figures["output tok/s"], figures["total tok/s"]) == (0.5, 1.0, 5.0)


def test_aborted_failed_and_unfinished_requests_are_counted_and_excluded() -> None:
    good = request(0.0, [1.0, 2.0])
    others = [
        request(0.0, [9.0, 10.0], reason="abort"),
        request(0.0, [], reason="error"),
        RequestTimeline("x", 0.0, 10, [(8.0, 1)], 0.0, None, None),
    ]
    figures = summarise([good, *others], Objectives(ttft=1.0))
    assert [figures[k] for k in ("requests", "completed", "aborted", "failed")] == [4, 1, 1, 2]
    assert (figures["TTFT count"], figures["TTFT p99 ms"], figures["E2E p99 ms"]) == (1, 1000, 2000)
    assert figures["duration s"] == 10.0 and figures["output tok/s"] == 0.2  # their time passed, their tokens were lost
    assert figures["goodput share"] == 0.25 and figures["goodput req/s"] == 0.1


def test_goodput_needs_both_objectives() -> None:
    requests = [
        request(0.0, [0.2, 0.3]),  # both kept, TTFT exactly
        request(0.0, [0.3, 0.4]),  # first token late
        request(0.0, [0.1, 0.4]),  # tokens slow
        request(0.0, [0.2]),  # one token: no TPOT that could be too long
        request(0.0, [0.1, 0.2], reason="error"),
    ]
    assert [Objectives(0.2, 0.11).met_by(r) for r in requests] == [True, False, False, True, False]
    figures = summarise(requests, Objectives(0.2, 0.11))
    assert figures["goodput req/s"] == pytest.approx(2 / 0.4) and figures["goodput share"] == 0.4
    assert summarise(requests, Objectives())["goodput share"] == 0.8


def test_prefix_hits_are_a_share_of_prompt_tokens() -> None:
    hit, miss = request(0.0, [1.0], prompt=30), request(0.0, [1.0], prompt=10)
    hit.num_cached_tokens, hit.num_preemptions = 16, 2
    figures = summarise([hit, miss], Objectives())
    assert (figures["prefix hit rate"], figures["preemptions"]) == (0.4, 2)


def test_percentiles_of_few_samples() -> None:
    assert percentile([], 95) is None
    assert percentile([7.0], 95) == 7.0
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert percentile([30.0, 10.0, 20.0], 50) == 20.0
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 95) == pytest.approx(4.8)
    assert percentile([1.0, 2.0], 100) == 2.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_no_request_at_all() -> None:
    figures = summarise([], Objectives())
    assert (figures["requests"], figures["QPS"], figures["goodput share"]) == (0, None, None)


def test_directions() -> None:
    higher = ("output tok/s", "QPS", "goodput req/s", "against.cloze", "batch at 1024", "output tok/round")
    lower = ("TTFT p95 ms", "TPOT b8 ms", "preemptions", "against.ppl", "decode idle share", "TTFT p50 rounds")
    neither = ("requests", "text", "completed", "kv", "batch mean")
    assert [{better(n) for n in names} for names in (higher, lower, neither)] == [{"higher"}, {"lower"}, {None}]
