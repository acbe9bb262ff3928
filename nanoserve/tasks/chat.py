"""``task=chat``: a conversation on the terminal. /reset forgets it, /exit leaves, Ctrl-C stops a reply."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from nanoserve.config import FreeText
from nanoserve.contracts.errors import ConfigError, NanoserveError, RequestError
from nanoserve.tasks.generate import composition

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.sampling_params import SamplingParams
    from nanoserve.tasks import Job


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/chat.yaml``."""

    system: FreeText | None = None
    enable_thinking: bool = True


def run(job: Job) -> dict[str, Any]:
    for key, value, only in (("logprobs", job.sampling.logprobs, None), ("n", job.sampling.n, 1)):
        if value != only:
            raise ConfigError(f"sampling.{key}: a chat shows one reply and no log-probabilities")
    opening = [] if job.options.system is None else [{"role": "system", "content": str(job.options.system)}]
    messages = list(opening)
    turns = 0
    template = {} if job.options.enable_thinking else {"enable_thinking": False}
    no_tokenizer = RequestError("this model has no tokenizer, so it cannot chat")
    if not job.config.has_checkpoint:
        raise no_tokenizer
    with job.llm() as llm:
        if llm.tokenizer is None:
            raise no_tokenizer
        print(f"[{composition(llm)} · /reset, /exit, Ctrl-C stops a reply]", file=sys.stderr)
        for text in read_user():
            if text == "/exit":
                break
            if text == "/reset":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = reply(llm, messages, job.sampling, **template)
            except RequestError as error:  # usually: the conversation has outgrown the context
                messages.pop()
                print(f"nanoserve: {error}; /reset starts a new conversation", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": answer})
            turns += 1
    return {"turns": turns}


def read_user() -> Iterator[str]:
    """Lines from the terminal (with history and editing) or from a pipe, until end of file. Blank lines are skipped."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() its editing)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line:
            yield line


def reply(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, **template: Any) -> str:
    """Stream one answer to standard output and return it, as far as it came if Ctrl-C stopped it."""
    text = ""
    stream = llm.stream(llm.render_chat(messages, **template), params)
    with _interrupts() as stopped, contextlib.closing(stream):  # type: ignore[type-var]
        for delta in stream:
            if delta.finish_reason == "error":
                raise NanoserveError(f"generation failed: {delta.outputs[0].error}")
            text += delta.text
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if stopped:
                break
    sys.stdout.write("\n")
    return text


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Note the first Ctrl-C instead of raising, so that no engine step is torn in the middle; the second one raises."""
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)
