"""``task=generate``: continue one prompt on the terminal, or a file of prompts as JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nanoserve.config import FreeText, build
from nanoserve.contracts.errors import ConfigError, NanoserveError, RequestError

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.outputs import RequestOutput
    from nanoserve.sampling_params import SamplingParams
    from nanoserve.tasks import Job

STDIO = "-"


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/generate.yaml``."""

    prompt: FreeText | None = None
    prompts: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise ConfigError('give either prompt="text to continue" or prompts=FILE.jsonl; see nanoserve --help')
        if self.output is not None and self.prompts is None:
            raise ConfigError("output: only the results of prompts=FILE.jsonl go into a file")
        files = [Path(name) for name in (self.prompts, self.output) if name is not None and Path(name).is_file()]
        if len(files) == 2 and files[0].samefile(files[1]):
            raise ConfigError(f"output: {self.output!r} is the file of prompts, and would be overwritten")


def run(job: Job) -> dict[str, Any]:
    if job.options.prompts is not None:
        return run_file(job)
    if job.sampling.logprobs is not None:
        raise ConfigError("sampling.logprobs: only prompts=FILE.jsonl shows log-probabilities")
    prompt = str(job.options.prompt)
    if prompt == STDIO:
        with _open(STDIO, "r", sys.stdin) as source:
            prompt = source.read()
        if wrong := not_utf8(prompt):
            raise RequestError(f"standard input is {wrong}")
    no_tokenizer = RequestError("this model has no tokenizer: write prompts=FILE.jsonl, with lines such as [1, 2, 3]")
    if not job.config.has_checkpoint:
        raise no_tokenizer
    with job.llm() as llm:
        if llm.tokenizer is None:
            raise no_tokenizer
        return run_prompt(llm, prompt, job.sampling)


# --- one prompt --------------------------------------------------------------------------------------------------


def run_prompt(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """Stream the completion to standard output and a line of figures to standard error."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\x1b[2m{prompt}\x1b[0m")  # dim: what the model did not write
    start = time.perf_counter()
    texts = [""] * params.n
    num_tokens = 0
    for delta in llm.stream(prompt, params):
        for completion in delta.outputs:
            num_tokens += len(completion.token_ids)
            texts[completion.index] += completion.text
            if params.n == 1:
                sys.stdout.write(completion.text)
                sys.stdout.flush()
            if completion.finish_reason == "error":
                raise NanoserveError(f"generation failed: {completion.error}")
    seconds = time.perf_counter() - start
    if params.n > 1:
        sys.stdout.write("\n".join(f"--- {i + 1}/{params.n}\n{text}" for i, text in enumerate(texts)))
    sys.stdout.write("\n")
    sys.stdout.flush()
    ttft = delta.metrics.ttft
    figures = {
        "prompt tokens": len(delta.prompt_token_ids),
        "tokens": num_tokens,
        "tok/s": round(num_tokens / seconds, 1),
        "TTFT ms": round(1e3 * ttft, 1) if ttft is not None else None,
        "finish": delta.finish_reason,
    }
    print(f"[{_words(figures)} · {composition(llm)}]", file=sys.stderr)
    return {**figures, "text": texts[0]}


def _words(figures: dict[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in figures.items())


def composition(llm: LLM) -> str:
    """The engine in one phrase: model, attention per phase, KV format, scheduler, policy."""
    info = llm.engine.info
    if info is None:
        return "engine without plugins"
    attention = ", ".join(f"{phase} {name}" for phase, name in info.attention.items())
    return f"{info.model} · {attention} · kv {info.kv} · {info.scheduler} · policy {info.policy} ({info.policy_origin})"


# --- a file of prompts -------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One input line and what became of it."""

    number: int
    prompt: Any = None
    params: SamplingParams | None = None
    error: str | None = None
    result: RequestOutput | None = None

    def to_json(self) -> str:
        row: dict[str, Any] = {"line": self.number, "prompt": self.prompt}
        if self.result is not None:
            first = self.result.outputs[0]
            row |= {"text": first.text, "finish_reason": first.finish_reason}
            row |= {"prompt_tokens": len(self.result.prompt_token_ids), "tokens": len(first.token_ids)}
            if len(self.result.outputs) > 1:
                row["texts"] = [completion.text for completion in self.result.outputs]
            if first.logprobs is not None:
                row |= {"token_ids": first.token_ids, "logprobs": first.logprobs}
        if self.error is not None:
            row["error"] = self.error
        # Half a surrogate pair is legal in JSON as an escape, and only so.
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def run_file(job: Job) -> dict[str, Any]:
    """Every line is answered by one line, in order. A line that is wrong gets an ``error`` and disturbs no other."""
    with _open(job.options.prompts, "r", sys.stdin) as source:
        lines = parse_lines(source, job.sampling)
    output = job.options.output
    if output not in (None, STDIO) and job.folder is not None:
        output = str(job.folder / Path(output).name)  # the jobs of a sweep must not overwrite each other's results
    with _open(output, "w", sys.stdout) as sink, job.llm() as llm:
        for line in lines:
            if line.error is None and line.params is not None:
                try:
                    llm.check(line.prompt, line.params)
                except RequestError as error:
                    line.error = str(error)
        good = [line for line in lines if line.error is None]
        start = time.perf_counter()
        params = [line.params for line in good if line.params is not None]
        results = llm.generate([line.prompt for line in good], params, progress=True) if good else []
        seconds = time.perf_counter() - start
        for line, result in zip(good, results, strict=True):
            line.result = result
            line.error = next((c.error for c in result.outputs if c.finish_reason == "error"), None)
        sink.writelines(line.to_json() + "\n" for line in lines)
        sink.flush()
        tokens = sum(len(completion.token_ids) for result in results for completion in result.outputs)
        figures = {"prompts": len(lines), "tokens": tokens, "tok/s": round(tokens / max(seconds, 1e-9), 1)}
        print(f"[{_words(figures)} · {composition(llm)}]", file=sys.stderr)
    failed = [line for line in lines if line.error is not None]
    if failed:
        first = failed[0]
        raise RequestError(f"{len(failed)} of {len(lines)} prompts failed, first line {first.number}: {first.error}")
    return figures


def parse_lines(source: Iterable[str], defaults: SamplingParams) -> list[Line]:
    """JSON lines: a string, or an object with ``prompt`` (text or token ids) and sampling fields. Skips blank ones."""
    base = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
    lines = []
    for number, text in enumerate(source, 1):
        if not text.strip():
            continue
        line = Line(number)
        lines.append(line)
        line.error = not_utf8(text)
        if line.error is not None:
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            line.error = f"not JSON: {error}"
            continue
        fields = dict(value) if isinstance(value, dict) else {"prompt": value}
        line.prompt = fields.pop("prompt", None)
        if not isinstance(line.prompt, (str, list)):
            line.error = 'expected a string or an object with "prompt" (a string or a list of token ids)'
            continue
        try:
            line.params = build(type(defaults), {**base, **fields}, "")
        except ConfigError as error:
            line.error = str(error)
    return lines


def not_utf8(text: str) -> str | None:
    """What is wrong with text of which ``_open`` let a byte through as a surrogate; None if nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: byte 0x{ord(text[error.start]) & 0xFF:02x} after {text[: error.start][-20:]!r}"
    return None


@contextlib.contextmanager
def _open(path: str | None, mode: str, standard: IO[str]) -> Iterator[IO[str]]:
    """A file or a standard stream of JSON lines. Bytes that are not UTF-8 become surrogates; a BOM is skipped."""
    encoding, errors = ("utf-8-sig", "surrogateescape") if mode == "r" else ("utf-8", "strict")
    if path in (None, STDIO):
        if isinstance(standard, io.TextIOWrapper):
            standard.reconfigure(encoding=encoding, errors=errors)
        yield standard
        return
    try:
        file = open(str(path), mode, encoding=encoding, errors=errors)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error
    with file:
        yield file
