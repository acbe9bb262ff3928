"""The server's figures: counters over the life of the server, gauges of the last step, latencies as histograms.

Names and meanings are those of vLLM's public metrics, so that dashboards made for it work; every one that is here
means the same. So, as there, a request with ``n`` choices counts as ``n`` requests with one prompt each: every choice
has its own time to first token, gaps, end, prompt and look-up in the prefix cache. When the first step of a request
began is known for all of its choices together. Latencies are measured from the arrival at the server. A prompt that is
only scored is a request of no output tokens.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from nanoserve.metrics import percentile
from nanoserve.outputs import EngineStats
from nanoserve.server.messages import Report, Step
from nanoserve.server.streams import Choice, RequestInFlight

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nanoserve.contracts.observer import EngineInfo

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
           160, 640, 2560)  # fmt: skip
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
WINDOW = 10.0  # seconds over which /stats averages
GAUGES = ("num_blocks", "num_free_blocks", "running", "waiting")
NO_STATS = EngineStats(*(0 for _ in fields(EngineStats)))


class Histogram:
    """Counts per bucket of ``value <= bound``. prometheus_client's own takes a lock and a label look-up per value."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times


class ServingMetrics:
    """Fed by AsyncLLM with every step and report; one per AsyncLLM, no global registry."""

    def __init__(self) -> None:
        self.running = self.waiting = self.prompt_tokens = 0
        self._stats = self._before = NO_STATS  # of this engine process; sums over those that have ended
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        seconds = {
            "ttft": ("time_to_first_token_seconds", "Arrival to first token."),
            "itl": ("inter_token_latency_seconds", "Token to token, for every output token after the first."),
            "tpot": (
                "request_time_per_output_token_seconds",
                "Mean inter-token latency of a request; 0 for one token.",
            ),
            "e2e": ("e2e_request_latency_seconds", "Arrival to last token."),
            "queue": ("request_queue_time_seconds", "Arrival to the first step that worked on it."),
            "prefill": ("request_prefill_time_seconds", "First step to first token."),
            "decode": ("request_decode_time_seconds", "First token to last token."),
            "inference": ("request_inference_time_seconds", "First step to last token."),
        }
        self.histograms = {key: Histogram(name, help, SECONDS) for key, (name, help) in seconds.items()}
        self.histograms["prompt"] = Histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.histograms["output"] = Histogram("request_generation_tokens", "Generated tokens per request.", TOKENS)
        self._recent_ttft: deque[tuple[float, float]] = deque(maxlen=1000)
        self._marks: deque[tuple[float, int, int]] = deque()  # time, prompt tokens, generation tokens
        self.start_time = time.time()

    # ---------------------------------------------------------------- fed

    def step(self, step: Step) -> None:
        self._stats = step.stats
        self.running, self.waiting = step.running, step.waiting
        if not self._marks or step.time - self._marks[-1][0] > 0.25:
            total = self.stats()
            self._marks.append((step.time, total.prompt_tokens, total.generation_tokens))
            while step.time - self._marks[0][0] > WINDOW:
                self._marks.popleft()

    def report(self, request: RequestInFlight, report: Report, now: float) -> None:
        """``now``: the time of the step. A request that is not streamed reports once, at its end."""
        first_token = report.times.first_token
        if first_token is not None:
            if any(choice.first_time is not None for choice in request.choices):
                self._step_of(request, report, now, first=now)
            else:
                ttft = first_token - request.metrics.arrival_time
                self._recent_ttft.append((now, ttft))
                whole = report.finished and max([len(c.token_ids) for c in report.completions]) > 1
                (self._whole if whole else self._step_of)(request, report, now, first=first_token)
        for completion in report.completions:
            if completion.finish_reason is not None:
                self._ended(request, request.choices[completion.index], completion.finish_reason, report)

    def tokens(self, choices: list[Choice], now: float) -> None:
        """A step at ``now`` brought one more token for each of these, which have begun."""
        gaps: dict[float, int] = {}  # most had their last token from the same step
        for choice in choices:
            gap = now - choice.last_time
            gaps[gap] = gaps.get(gap, 0) + 1
            choice.num_tokens += 1
            choice.last_time = now
        for gap, times in gaps.items():
            self.histograms["itl"].observe(gap, times)

    def _step_of(self, request: RequestInFlight, report: Report, now: float, first: float) -> None:
        """What a step brought of choices that stream. first: the time of the first token of those that begin."""
        for completion in report.completions:
            if not (num_tokens := len(completion.token_ids)):
                continue
            choice = request.choices[completion.index]
            choice.num_tokens += num_tokens
            if choice.first_time is None:
                self._begun(request, choice, first)
                num_tokens -= 1
            if num_tokens:
                self.histograms["itl"].observe((now - choice.last_time) / num_tokens, num_tokens)
                choice.last_time = now

    def _whole(self, request: RequestInFlight, report: Report, now: float, first: float) -> None:
        """All of a request at once: its choices are taken to have begun together, and to have advanced evenly."""
        assert report.times.finished is not None
        longest = max([len(completion.token_ids) for completion in report.completions])
        gap = (report.times.finished - first) / (longest - 1)
        for completion in report.completions:
            choice, num_tokens = request.choices[completion.index], len(completion.token_ids)
            if num_tokens:
                choice.num_tokens = num_tokens
                self._begun(request, choice, first)
                choice.last_time = first + gap * (num_tokens - 1)
                self.histograms["itl"].observe(gap, num_tokens - 1)

    def _begun(self, request: RequestInFlight, choice: Choice, now: float) -> None:
        choice.first_time = choice.last_time = now
        self.prompt_tokens += len(request.prompt_token_ids)
        self.histograms["ttft"].observe(now - request.metrics.arrival_time)

    def _ended(self, request: RequestInFlight, choice: Choice, reason: str, report: Report) -> None:
        choice.ended = True
        self.finished[reason] += 1
        scheduled, first, last = report.times.first_scheduled, choice.first_time, choice.last_time
        if scheduled is None or first is None:
            return
        arrival, histograms = request.metrics.arrival_time, self.histograms
        histograms["e2e"].observe(last - arrival)
        histograms["queue"].observe(scheduled - arrival)
        histograms["prefill"].observe(first - scheduled)
        histograms["decode"].observe(last - first)
        histograms["inference"].observe(last - scheduled)
        histograms["prompt"].observe(len(request.prompt_token_ids))
        histograms["output"].observe(choice.num_tokens)
        histograms["tpot"].observe((last - first) / max(1, choice.num_tokens - 1))

    def scored(self, num_tokens: int, reason: str, seconds: float) -> None:
        """A prompt that was only scored, how it ended (as ``finished`` has it), and its time since the arrival."""
        self.finished[reason] += 1
        if reason == "length":
            self.prompt_tokens += num_tokens
            self.histograms["e2e"].observe(seconds)
            self.histograms["prompt"].observe(num_tokens)
            self.histograms["output"].observe(0)

    def failed(self, request: RequestInFlight) -> None:
        """The request ended with its engine."""
        self.finished["error"] += sum([not choice.ended for choice in request.choices])

    def engine_ended(self) -> None:
        """The counters of the next engine process begin at 0; ours go on."""
        self._before = replace(self.stats(), **dict.fromkeys(GAUGES, 0))
        self._stats = NO_STATS
        self.running = self.waiting = 0

    # ---------------------------------------------------------------- read

    def stats(self) -> EngineStats:
        """Counters over all engine processes, gauges of this one."""
        if self._before is NO_STATS:
            return self._stats
        return EngineStats(*(getattr(self._before, f.name) + getattr(self._stats, f.name) for f in fields(EngineStats)))

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold."""
        stats = self._stats
        return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0

    def live(self) -> dict[str, Any]:
        """Figures of this moment, rates and latencies over the last ten seconds."""
        stats, now = self.stats(), time.perf_counter()
        recent = [mark for mark in self._marks if now - mark[0] <= WINDOW]
        rates = {"prompt_tokens_per_s": 0.0, "generation_tokens_per_s": 0.0}
        if recent and (elapsed := now - recent[0][0]) > 0:
            rates["prompt_tokens_per_s"] = (stats.prompt_tokens - recent[0][1]) / elapsed
            rates["generation_tokens_per_s"] = (stats.generation_tokens - recent[0][2]) / elapsed
        ttft = [1e3 * value for at, value in self._recent_ttft if now - at <= WINDOW]
        return {
            **{f.name: getattr(stats, f.name) for f in fields(EngineStats)},
            "running": self.running,
            "waiting": self.waiting,
            "kv_usage": self.kv_usage,
            **rates,
            "ttft_p50_ms": percentile(ttft, 50),
            "ttft_p99_ms": percentile(ttft, 99),
            "uptime_s": time.time() - self.start_time,
        }


class PrometheusCollector:
    """ServingMetrics in the form that prometheus_client writes out. Labels: model_name, engine (always "0")."""

    def __init__(self, metrics: ServingMetrics, model_name: str, info: EngineInfo | None) -> None:
        self._metrics, self._info = metrics, info
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics, stats, names = self._metrics, self._metrics.stats(), list(self._labels)
        values = list(self._labels.values())
        gauges = {
            "num_requests_running": ("Sequences that hold KV blocks.", metrics.running),
            "num_requests_waiting": ("Sequences that wait for a place in a step.", metrics.waiting),
            "kv_cache_usage_perc": ("Share of KV blocks in use; 1 is all.", metrics.kv_usage),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", help, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "prompt_tokens": (
                "Prompt tokens of requests that have a first token, and of scored ones.",
                metrics.prompt_tokens,
            ),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "num_preemptions": ("Preemptions.", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
        }
        for name, (help, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", help, labels=names)
            counter.add_metric(values, value)
            yield counter
        ended_as = [*names, "finished_reason"]
        success = CounterMetricFamily("vllm:request_success", "Requests by how they ended.", labels=ended_as)
        for reason, count in metrics.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for histogram in metrics.histograms.values():
            family = HistogramMetricFamily(f"vllm:{histogram.name}", histogram.help, labels=names)
            total, buckets = 0, []
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
            family.add_metric(values, buckets=buckets, sum_value=histogram.sum)
            yield family
        if self._info is not None:
            about = {"block_size": str(self._info.block_size), "num_gpu_blocks": str(self._info.num_blocks)}
            cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=["engine", *about])
            cache.add_metric(["0", *about.values()], 1)
            yield cache


def exposition(metrics: ServingMetrics, model_name: str, info: EngineInfo | None) -> tuple[bytes, str]:
    """The Prometheus text and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, model_name, info))  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST
