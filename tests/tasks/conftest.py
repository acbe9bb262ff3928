"""The command line in this process, with an engine that only records what it was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from nanoserve.cli import main
from nanoserve.config import PLUGIN_GROUPS
from nanoserve.contracts.errors import CapacityError
from nanoserve.contracts.observer import EngineInfo
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.tasks import Job
from tests.helpers.tiny_model import build_tiny_model
from tests.helpers.tiny_tokenizer import save_tiny_tokenizer


@dataclass
class Outcome:
    code: int
    out: str
    err: str


class EchoLLM:
    """Answers with the prompt reversed, one character per delta. Prompts longer than 40 characters do not fit."""

    tokenizer: Any = "characters"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.requests: list[tuple[Any, Any]] = []
        self.closed = False
        self.engine = dataclasses.make_dataclass("Engine", ["info"])(
            EngineInfo("echo", {"prefill": "sdpa"}, job.config.kv.name, job.config.scheduler.name, "auto", 16, 8, 256)
        )

    def check(self, prompt: Any, params: Any) -> None:
        if len(prompt) > 40:
            raise CapacityError("the prompt has more than 40 tokens")

    def stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        self.check(prompt, params)
        self.requests.append((prompt, params))
        return (self._output(prompt, character, params.n) for character in list(reversed(prompt)) or [""])

    def generate(self, prompts: Any, params: Any, progress: bool = False) -> list[RequestOutput]:
        self.requests += zip(prompts, params, strict=True)
        return [self._output(p, str(p)[::-1], one.n) for p, one in zip(prompts, params, strict=True)]

    def render_chat(self, messages: Any, **template: Any) -> str:
        return messages[-1]["content"]

    @staticmethod
    def _output(prompt: Any, text: str, n: int) -> RequestOutput:
        completions = [CompletionOutput(i, text, [0] * len(text), finish_reason="stop") for i in range(n)]
        metrics = RequestMetrics(arrival_time=0.0, first_token_time=0.01)
        return RequestOutput("0", None, [0] * len(prompt), completions, True, 0, metrics)

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@dataclass
class Cli:
    """``cli("prompt=x") -> Outcome``; ``cli.llms`` are the engines that were built."""

    capture: Callable[[], tuple[str, str]]
    llms: list[EchoLLM] = field(default_factory=list)

    def __call__(self, *arguments: str) -> Outcome:
        self.capture()
        code = main(arguments)
        return Outcome(code, *self.capture())


@pytest.fixture(autouse=True)
def terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as the terminal says; here none cuts or wraps a cell."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer, for the tests that run a real engine."""
    folder = tmp_path_factory.mktemp("tiny") / "epoch=9,x"
    build_tiny_model(folder)
    return save_tiny_tokenizer(folder)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Cli]:
    """Runs in an empty working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    command = Cli(lambda: tuple(capsys.readouterr()))  # type: ignore[arg-type]

    def llm(job: Job) -> EchoLLM:
        command.llms.append(EchoLLM(job))
        return command.llms[-1]

    monkeypatch.setattr(Job, "llm", llm)
    yield command
    for group in PLUGIN_GROUPS:  # the names of a test's fake plugins
        ConfigStore.instance().repo.pop(group, None)
