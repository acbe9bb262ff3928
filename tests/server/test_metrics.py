"""The figures for Prometheus, against timelines whose figures are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nanoserve import SamplingParams
from nanoserve.server.messages import Completion, Report, Times
from nanoserve.server.metrics import ServingMetrics
from nanoserve.server.streams import Inbox, RequestInFlight
from tests.helpers.serving import Server

ARRIVAL, SCHEDULED = 100.0, 101.0  # seconds


def request(n: int) -> RequestInFlight:
    return RequestInFlight("r", "", None, [1] * 40, SamplingParams(n=n), Inbox(), ARRIVAL)


def report(tokens: dict[int, int], ends: dict[int, str], first: float, finished: float | None = None) -> Report:
    """tokens: how many of each choice; ends: finish reasons."""
    completions = [
        Completion(i, "", [0] * tokens.get(i, 0), None, None, ends.get(i), None, None) for i in sorted({*tokens, *ends})
    ]
    return Report("r", finished is not None, 0, completions, Times(SCHEDULED, first, finished, 0))


def test_tokens_in_columns() -> None:
    """Begun at 103, then a token at 104, 105 and 107, and the last at 107.5."""
    metrics, one = ServingMetrics(), request(1)
    metrics.report(one, report({0: 1}, {}, 103.0), 103.0)
    for now in (104.0, 105.0, 107.0):
        metrics.tokens(one.choices, now)
    metrics.report(one, report({0: 1}, {0: "length"}, 103.0, 107.5), 107.5)
    assert figures(metrics, "ttft", "itl", "tpot", "e2e", "output") == {
        "ttft": (1, 3.0), "itl": (4, 4.5), "tpot": (1, 4.5 / 4), "e2e": (1, 7.5), "output": (1, 5),
    }  # fmt: skip


def figures(metrics: ServingMetrics, *keys: str) -> dict[str, Any]:
    """Number of observations and their sum."""
    return {key: (sum(metrics.histograms[key].counts), pytest.approx(metrics.histograms[key].sum)) for key in keys}


def test_choices_that_stream() -> None:
    """The first begins at 103 and has a token a second; the second begins at 104, gets two at once, and ends first.

    Gaps: 1, 1, 1 s and 0.5, 0.5 s.
    """
    metrics, one = ServingMetrics(), request(2)
    metrics.report(one, report({0: 1}, {}, 103.0), 103.0)
    metrics.report(one, report({0: 1, 1: 1}, {}, 103.0), 104.0)
    metrics.report(one, report({0: 1, 1: 2}, {1: "stop"}, 103.0), 105.0)
    assert metrics.finished["stop"] == 1
    metrics.report(one, report({0: 1}, {0: "length"}, 103.0, 106.0), 106.0)
    assert figures(metrics, *metrics.histograms) == {
        "ttft": (2, 3 + 4),
        "itl": (5, 4.0),
        "tpot": (2, 3 / 3 + 1 / 2),
        "e2e": (2, 6 + 5),
        "queue": (2, 1 + 1),
        "prefill": (2, 2 + 3),
        "decode": (2, 3 + 1),
        "inference": (2, 5 + 4),
        "prompt": (2, 80),
        "output": (2, 4 + 3),
    }
    assert metrics.prompt_tokens == 80 and metrics.finished["length"] == 1


def test_choices_that_come_whole() -> None:
    """Five tokens in four seconds, so a second each; the shorter choice has advanced with the longer one."""
    metrics = ServingMetrics()
    metrics.report(request(2), report({0: 5, 1: 3}, {0: "length", 1: "stop"}, 103.0, 107.0), 107.5)
    assert figures(metrics, "ttft", "itl", "tpot", "decode", "e2e") == {
        "ttft": (2, 3 + 3),
        "itl": (6, 6.0),
        "tpot": (2, 1 + 1),
        "decode": (2, 4 + 2),
        "e2e": (2, 7 + 5),
    }


def test_one_token_has_no_gap() -> None:
    metrics = ServingMetrics()
    metrics.report(request(1), report({0: 1}, {0: "length"}, 103.0, 103.0), 103.5)
    assert figures(metrics, "itl", "tpot", "decode", "e2e") == {
        "itl": (0, 0), "tpot": (1, 0), "decode": (1, 0), "e2e": (1, 3),
    }  # fmt: skip


def test_what_never_had_a_token_has_no_latency() -> None:
    metrics, one, other = ServingMetrics(), request(2), request(3)
    aborted = report({}, {0: "abort", 1: "abort"}, 0.0, 105.0)
    aborted.times.first_token = None
    metrics.report(one, aborted, 105.0)
    metrics.report(other, report({0: 1}, {0: "length"}, 103.0), 103.0)
    metrics.failed(other)  # its engine has died
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 2, "error": 2}
    assert figures(metrics, "ttft", "e2e") == {"ttft": (1, 3), "e2e": (1, 3)}


def test_a_prompt_that_is_only_scored_is_a_request_without_output(server: Server) -> None:
    def samples() -> dict[str, float]:
        lines = (line.rpartition(" ") for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
        return {name: float(value) for name, _, value in lines}

    before = samples()
    server.complete(prompt=[[5] * 40, [6] * 7], max_tokens=0, echo=True, logprobs=0)
    grown = {name.split("{")[0]: value - before[name] for name, value in samples().items() if value > before[name]}
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] == 40 + 7
    assert grown["vllm:request_success_total"] == grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert "vllm:time_to_first_token_seconds_count" not in grown and "vllm:generation_tokens_total" not in grown
