"""Workloads: arrivals and lengths by hand, prefixes that are really shared, both trace formats, strict options."""

import json
from pathlib import Path

import pytest

from nanoserve.config import build
from nanoserve.contracts.errors import ConfigError
from nanoserve.workload import Request, Workload, WorkloadOptions, make_workload, token_ids

LENGTHS = {"input_len": 4, "output_len": 2}


def make(max_model_len: int | None = None, **options) -> Workload:
    return make_workload(build(WorkloadOptions, options, "workload"), max_model_len)


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival for request in workload.requests]


def test_arrivals() -> None:
    assert arrivals(make(num_requests=3, **LENGTHS)) == [0, 0, 0]
    burst = make(num_requests=5, arrival="burst", rate=4.0, burst_size=2, **LENGTHS)
    assert arrivals(burst) == [0, 0, 0.5, 0.5, 1.0]
    closed = make(num_requests=3, arrival="closed", concurrency=2, **LENGTHS)
    assert (arrivals(closed), closed.concurrency) == ([0, 0, 0], 2)
    times = arrivals(make(num_requests=4001, arrival="poisson", rate=50.0, **LENGTHS))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0 and mean == pytest.approx(1 / 50, rel=0.05)
    # An exponential distribution has a standard deviation equal to its mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def test_lengths() -> None:
    uniform = make(num_requests=500, input_len=[3, 5], output_len={"median": 20, "sigma": 1.0, "max": 90}).requests
    assert {r.prompt_len for r in uniform} == {3, 4, 5}
    outputs = sorted(r.output_len for r in uniform)
    by_turns = make(num_requests=3, input_len={"each": [7, 9]}, output_len=1).requests
    assert [r.prompt_len for r in by_turns] == [7, 9, 7]
    assert outputs[0] >= 1 and outputs[-1] == 90 and outputs[250] == pytest.approx(20, rel=0.2)


def test_the_same_seed_gives_the_same_workload() -> None:
    options = {"num_requests": 9, "arrival": "poisson", "rate": 1.0, "input_len": [1, 99], "output_len": [1, 99]}
    assert make(**options) == make(**options) != make(**options, seed=1)


def test_shared_prefixes() -> None:
    """Two system prompts by turns: six equal tokens, then each its own; another seed shares nothing with the first."""
    requests = make(num_requests=4, shared_prefix_len=6, num_prefixes=2, input_len=30, output_len=1).requests
    ids = [token_ids(request, 1000) for request in requests]
    assert [len(x) for x in ids] == [r.prompt_len for r in requests] == [36] * 4
    assert ids[0][:6] == ids[2][:6] != ids[1][:6] == ids[3][:6]
    assert len({tuple(x[6:12]) for x in ids}) == 4
    assert all(0 <= token < 1000 for x in ids for token in x)
    assert token_ids(requests[0], 1000) == ids[0] and token_ids(requests[0], 1000, seed=1)[:6] != ids[0][:6]


def test_turns_of_a_conversation() -> None:
    """Prompt n is prompt n - 1, its reply and a new message; conversations share the system prompt only."""
    workload = make(
        num_requests=5, turns=3, think_time=2.0, shared_prefix_len=8, input_len=4, output_len=3, arrival="burst",
        burst_size=1, rate=1.0,
    )  # fmt: skip
    assert [(r.arrival, r.prompt_len) for r in workload.requests] == [(0, 12), (1, 12), (2, 19), (3, 19), (4, 26)]
    first, other, second, _, third = [token_ids(r, 1000) for r in workload.requests]
    assert second[:12] == first and third[:19] == second
    assert other[:8] == first[:8] and other[8:] != first[8:]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.4799600,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 3, "hash_ids": [0, 1, 7]},
    {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]},
]


def test_azure_traces(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    trace = {"num_requests": None, "trace": str(file), "arrival": "trace"}
    assert make(**trace).requests == (Request(0, 0, 4808, 10), Request(1, 0.5, 110, 27))
    scaled = make(**trace, length_scale=0.1, time_scale=2.0).requests
    assert scaled == (Request(0, 0, 480, 1), Request(1, 1.0, 11, 2))
    with pytest.raises(ConfigError, match=r"workload.length_scale: 1 of 2 requests exceed .* 100 tokens"):
        make(100, **trace, length_scale=0.1)
    # Only the lengths may be asked for, and they are made to fit where no scale is given.
    fitted = make(100, num_requests=2, trace=str(file), arrival="burst", rate=1.0, burst_size=1).requests
    assert [(r.arrival, r.prompt_len, r.output_len) for r in fitted] == [(0, 99, 1), (1, 2, 1)]


def test_mooncake_traces(tmp_path: Path) -> None:
    """Equal hash ids are equal tokens, also when lengths are scaled; requests come in the order of their times."""
    file = tmp_path / "mooncake.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    full = make(num_requests=None, trace=str(file), arrival="trace").requests
    assert [(r.id, r.arrival, r.prompt_len) for r in full] == [(0, 0, 1100), (1, 1, 600), (2, 3, 1030)]
    assert full[0].prefix == ((0, 512), (1, 512), (2, 76))
    small = make(num_requests=None, trace=str(file), arrival="trace", length_scale=1 / 64).requests
    a, b, c = [token_ids(request, 5000) for request in small]
    assert [len(a), len(b), len(c)] == [17, 9, 16] and a[:16] == c[:16] and a[:8] == b[:8] and a[8] != b[8]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read"), ("", "no request"), ("a,b\n1,2\n", "request 1"), ('{"timestamp": 0}\n', "input_length")],
)
def test_traces_that_cannot_be_read(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "trace"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"(?s)workload.trace: .*{reason}"):
        make(trace=str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": 4}, "workload.output_len"),
        ({**LENGTHS, "arrival": "poisson"}, "workload.rate"),
        ({**LENGTHS, "rate": 1.0}, "workload.rate"),
        ({**LENGTHS, "arrival": "closed"}, "workload.concurrency"),
        ({**LENGTHS, "arrival": "trace"}, "workload.trace"),
        ({**LENGTHS, "trace": "x"}, "workload.input_len"),
        ({**LENGTHS, "num_prefixes": 2}, "workload.num_prefixes"),
        ({**LENGTHS, "think_time": 1.0}, "workload.think_time"),
        ({"input_len": [5, 4], "output_len": 1}, "workload.input_len"),
        ({**LENGTHS, "inputs": 1}, "workload.inputs: unknown option"),
    ],
)
def test_options_are_strict(options: dict, message: str) -> None:
    """No option is accepted and ignored."""
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_what_does_not_fit_is_refused() -> None:
    assert make(6, **LENGTHS)
    with pytest.raises(ConfigError, match="workload.input_len: 32 of 32 requests exceed"):
        make(5, **LENGTHS)
