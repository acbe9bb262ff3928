"""``task=eval``: how good the model is, and what the KV format ``eval.against`` costs compared with ``kv``.

Two engines that differ in the KV format alone read the same texts, chunk by chunk through their caches. One table at
the end: a column per format, the difference, and for the figures that have a bar whether it was met. A bar that was
missed makes the exit code 1. Definitions stand where the figures are computed: ``scoring``, ``attention_check``,
``task_set``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.config import PluginChoice
from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.tasks.bench.record import describe, print_line, print_table, write

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine
    from nanoserve.llm import LLM
    from nanoserve.tasks import Job
    from nanoserve.tasks.eval.texts import Document

PROMPT_TOKENS, GREEDY_TOKENS = 128, 64
POOL_TOKENS = 8192  # KV pool of each engine: two must fit on one device
#: Two best tokens closer than this, in nats, are a tie that any rounding may decide.
TIE = 0.1
#: Bars of the INT8 format: attention at batch 8, context 511, unit normal data.
MIN_COSINE, MAX_ERROR, EXPLICIT_TOLERANCE = 0.99995, 0.003, 3e-2


#: Figures that a sweep's table shows.
SWEPT = (
    "base.ppl",
    "against.ppl",
    "delta_ppl",
    "kl",
    "top1_agreement",
    "attention_cosine",
    "against.parses",
    "against.brackets",
    "against.cloze",
)


class EvalFailedError(NanoserveError):
    """A figure missed its bar."""


@dataclass(frozen=True)
class EvalOptions:
    """The keys of ``conf/eval``; they are explained there."""

    against: str = "int8"
    text: str | None = None
    max_bytes: int | None = 65536
    window: int = 1024
    stride: int = 512
    chunk: int = 256
    num_prompts: int = 16
    num_items: int = 60
    seed: int = 0
    max_delta_ppl: float = 0.005

    def __post_init__(self) -> None:
        for name in ("max_bytes", "window", "stride", "chunk", "num_prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"eval.{name} must be at least 1, not {value}")
        if self.stride > self.window:
            raise ConfigError(f"eval.stride={self.stride} exceeds eval.window={self.window}: tokens would be left out")
        if self.num_items < 0:
            raise ConfigError(f"eval.num_items must be at least 0, not {self.num_items}")
        if not self.max_delta_ppl >= 0:
            raise ConfigError(f"eval.max_delta_ppl must be at least 0, not {self.max_delta_ppl}")


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/eval.yaml``."""

    eval: EvalOptions
    output: str | None = None


@dataclass(frozen=True)
class Bar:
    """What a figure must reach. gates: missing it fails the run."""

    figure: str
    limit: float
    at_least: bool = False
    gates: bool = True

    def met(self, figures: dict[str, Any]) -> bool:
        value = figures[self.figure]  # NaN meets nothing
        return bool(value >= self.limit if self.at_least else value <= self.limit)


def run(job: Job) -> dict[str, Any]:
    options: EvalOptions = job.options.eval
    output = job.file("output", job.options.output)
    from nanoserve.tasks.eval import texts

    documents = texts.documents_in(Path(options.text)) if options.text is not None else texts.heldout_documents()
    documents = texts.cut(documents, options.max_bytes)
    base_name, other_name = job.config.kv.name, options.against
    if job.config.kv == PluginChoice(other_name):
        raise ConfigError(
            f"eval.against: {other_name} would be compared with itself; write another kv= or eval.against="
        )
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(llm) for llm in _engines(job, options)]
        figures, bars = evaluate(llms[0], llms[1], documents, options)
        environment = {**describe(llms[0]), "engine_against": asdict(llms[1].engine.info)}  # type: ignore[arg-type]
    missed = [bar.figure for bar in bars if bar.gates and not bar.met(figures)]
    told = [{**asdict(bar), "met": bar.met(figures)} for bar in bars]
    print_report(figures, told, base_name, other_name, environment)
    if output is not None:
        record = {
            **environment,
            "base": base_name,
            "against": other_name,
            "documents": [name for name, _ in documents],
            "eval": asdict(options),
            "config": asdict(job.config),
            "figures": figures,
            "bars": told,
        }
        write(output, record)
    if missed:
        raise EvalFailedError(f"kv={other_name} misses the bar for {', '.join(missed)} (compared with kv={base_name})")
    return {name: float(f"{figures[name]:.5g}") for name in SWEPT if name in figures}


def _engines(job: Job, options: EvalOptions) -> Iterator[LLM]:
    """The configured engine, and the same with the other KV format; small pools, and every token computed."""
    engine = job.config.engine
    pool = -(-max(POOL_TOKENS, options.window + 1) // engine.block_size)
    engine = replace(engine, enable_prefix_caching=False, num_kv_blocks=engine.num_kv_blocks or pool)
    for kv in (job.config.kv, PluginChoice(options.against)):
        yield replace(job, config=replace(job.config, kv=kv, engine=engine)).llm()


def evaluate(
    base: LLM, other: LLM, documents: list[Document], options: EvalOptions
) -> tuple[dict[str, Any], list[Bar]]:
    """All figures, and the bars for them. Figures of one format are called ``base.NAME`` and ``against.NAME``."""
    from nanoserve.tasks.eval import attention_check, task_set, texts

    if base.tokenizer is None:
        raise ConfigError("this model has no tokenizer, so it cannot read a text; choose a model that has one")
    with _progress() as step:
        figures: dict[str, Any] = score_texts(base, other, documents, options, step)
        figures |= greedy(base, other, documents, options, step)
        step("attention", 1)
        context = min(511, base.engine.capacity - 1)
        recorded = [attention_check.record(llm.engine, context=context) for llm in (base, other)]
        figures |= attention_check.compare(*recorded)
        if options.num_items:
            held_out = texts.heldout_documents()
            gaps = task_set.bracket_gaps(held_out, options.num_items, options.seed)
            clozes = task_set.cloze_gaps(held_out, options.num_items, options.seed)
            prompts = task_set.parse_prompts(options.num_items)
            for side, llm in (("base", base), ("against", other)):
                for name, result in (
                    ("parses", task_set.parses(llm, prompts)),
                    ("brackets", task_set.brackets(llm, gaps, options.chunk)),
                    ("cloze", task_set.cloze(llm, clozes, options.chunk)),
                ):
                    figures[f"{side}.{name}"], figures[f"num_{name}"] = result.share, result.total
                    step("tasks", result.total)
    bars = [
        Bar("delta_ppl", options.max_delta_ppl),
        Bar("first_token_agreement", 1.0, at_least=True),
        Bar("attention_cosine", MIN_COSINE, at_least=True),
        Bar("attention_error_p999", MAX_ERROR),
        # The maximum of so many outputs is one of the draw and of the number of heads: told, but no reason to fail.
        Bar("attention_max_error", MAX_ERROR, gates=False),
        Bar("explicit_error", EXPLICIT_TOLERANCE),
        Bar("recovery_steps", recorded[1].recovery_limit),
    ]
    return figures, bars


def score_texts(base: LLM, other: LLM, documents: list[Document], options: EvalOptions, step: Any) -> dict[str, Any]:
    """Perplexity of both engines and the divergence between them, over sliding windows of every document."""
    import torch

    from nanoserve.tasks.eval import scoring

    engines: list[Engine] = [base.engine, other.engine]
    window = min(options.window, *(engine.capacity - 1 for engine in engines))
    stride = min(options.stride, window)
    sides = [scoring.Perplexity(), scoring.Perplexity()]
    divergence = scoring.Divergence()
    for _, text in documents:
        token_ids = base.tokenizer.encode(text)  # type: ignore[union-attr]
        if len(token_ids) < 2:
            continue
        for side in sides:
            side.num_bytes += len(text.encode())
        for at in scoring.windows(len(token_ids), window, stride):
            streams = (scoring.prompt_logits(e, token_ids[at.start : at.end], options.chunk) for e in engines)
            position = at.start
            for pair in zip(*streams, strict=True):
                n, skipped = len(pair[0]), max(0, at.first - position)
                if skipped < n:
                    targets = torch.tensor(token_ids[position + skipped + 1 : position + n + 1], device=pair[0].device)
                    logits = [side[skipped:] for side in pair]
                    scores = [scoring.token_scores(side, targets) for side in logits]
                    for side, score in zip(sides, scores, strict=True):
                        side.add(score.nll)
                    divergence.add(scores[0], scores[1], scoring.kl_divergence(logits[0], logits[1]))
                position += n
            step("texts", at.end - at.first)
    if not sides[0].num_tokens:
        raise ConfigError("eval.text: there is no text of two tokens or more")
    figures: dict[str, Any] = {"tokens": sides[0].num_tokens, "bytes": sides[0].num_bytes}
    for name, side in zip(("base", "against"), sides, strict=True):
        figures |= {f"{name}.{key}": value for key, value in side.figures().items()}
    return figures | divergence.figures()


def greedy(base: LLM, other: LLM, documents: list[Document], options: EvalOptions, step: Any) -> dict[str, Any]:
    """Greedy continuations with both formats, of prompts taken evenly from the texts.

    first_token_agreement: share of equal first tokens where the base's two best are at least ``TIE`` nats apart.
    """
    from nanoserve.sampling_params import SamplingParams
    from nanoserve.tasks.eval.scoring import greedy_agreement

    length = min(PROMPT_TOKENS, base.engine.capacity - GREEDY_TOKENS - 1)
    if length < 1:
        raise ConfigError(f"a context of {base.engine.capacity} tokens is too short for {GREEDY_TOKENS} greedy tokens")
    pieces = []
    for _, text in documents:
        ids = base.tokenizer.encode(text)  # type: ignore[union-attr]
        pieces += [ids[at : at + length] for at in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if len(piece) == length] or pieces[:1]
    count = min(options.num_prompts, len(pieces))
    prompts = [pieces[i * len(pieces) // count] for i in range(count)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=GREEDY_TOKENS, logprobs=2)
    outputs = []
    for llm in (base, other):
        outputs.append(llm.generate(prompts, params))
        step("greedy", count)
    first = []
    for a, b in zip(*outputs, strict=True):
        best, second = sorted(a.logprobs[0].values(), reverse=True)[:2]
        if best - second >= TIE:
            first.append(a.token_ids[0] == b.token_ids[0])
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(*outputs, strict=True)]
    agreement = sum(first) / len(first) if first else 1.0  # nothing but ties
    return {"num_prompts": count, "first_token_agreement": agreement, **greedy_agreement(pairs)}


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(unit="", disable=not sys.stderr.isatty(), leave=False) as bar:

        def step(what: str, amount: int) -> None:
            bar.set_description(f"eval: {what}", refresh=False)
            bar.update(amount)

        yield step


#: Rows of the table: title, figure, format. A figure of both formats fills both columns.
ROWS = [
    ("NLL per token, nats", "nll", ".4f"),
    ("perplexity per token", "ppl", ".4f"),
    ("perplexity per byte", "byte_ppl", ".4f"),
    ("bits per byte", "bits_per_byte", ".4f"),
    ("ΔNLL, nats", "delta_nll", "+.5f"),
    ("  standard error", "delta_nll_stderr", ".5f"),
    ("Δ perplexity", "delta_ppl", "+.3%"),
    ("KL per token, nats", "kl", ".2e"),
    ("  99th percentile", "kl_p99", ".2e"),
    ("top-1 agreement, teacher-forced", "top1_agreement", ".2%"),
    ("first greedy token equal, ties aside", "first_token_agreement", ".1%"),
    (f"{GREEDY_TOKENS}-token greedy agreement *", "greedy_agreement", ".1%"),
    ("  outputs equal throughout *", "greedy_identical", ".1%"),
    ("  tokens to first divergence *", "first_divergence", ".1f"),
    ("attention output: cosine", "attention_cosine", ".6f"),
    ("  |error|, 99.9th percentile", "attention_error_p999", ".5f"),
    ("  |error|, maximum of a draw", "attention_max_error", ".5f"),
    ("  kernel − explicit dequantisation", "explicit_error", ".1e"),
    ("stored − recovered, INT8 steps", "recovery_steps", ".3f"),
    ("task: continuation parses", "parses", ".1%"),
    ("task: closing bracket", "brackets", ".1%"),
    ("task: identifier cloze", "cloze", ".1%"),
]


def report_rows(figures: Mapping[str, Any], bars: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The report as rows of text: figure, base, against, their difference, bar, verdict. bars: as in the record."""
    by_figure = {bar["figure"]: bar for bar in bars}
    rows = []
    for label, key, form in ROWS:
        if f"num_{key}" in figures:
            label += f" ({figures[f'num_{key}']} items)"
        if f"base.{key}" in figures:
            a, b = figures[f"base.{key}"], figures[f"against.{key}"]
            rows.append([label, format(a, form), format(b, form), format(b - a, "+" + form), "", ""])
        elif key in figures:
            bar = by_figure.get(key)
            limit = "" if bar is None else f"{'≥' if bar['at_least'] else '≤'} {format(bar['limit'], form)}"
            verdict = "" if bar is None else "pass" if bar["met"] else "FAIL" if bar["gates"] else "over"
            rows.append([label, "", "", format(figures[key], form), limit, verdict])
    return rows


def print_report(
    figures: Mapping[str, Any], bars: Sequence[Mapping[str, Any]], base: str, other: str, environment: Mapping[str, Any]
) -> None:
    print_line(
        "* no quality metric: one near-tie that falls the other way changes all that follows; "
        "perplexity and KL compare every token given the same past"
    )
    print_line(f"{environment['hardware']}, torch {environment['versions']['torch']}, model and attention:")
    for engine in (environment["engine"], environment["engine_against"]):
        phases = ", ".join(f"{phase} {name}" for phase, name in engine["attention"].items())
        print_line(f"  {engine['model']}, kv {engine['kv']}: {phases}")
    title = f"eval: {figures['tokens']} tokens, {figures['bytes']} bytes scored"
    columns = ["figure", f"kv={base}", f"kv={other}", f"{other} against {base}", "bar", ""]
    print_table(title, columns, report_rows(figures, bars))
