"""Plugins of strangers in a served engine: grammars that are slow or broken, schedulers that look at priorities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nanoserve import AsyncLLM, PluginError, RequestError, SamplingParams, StructuredOutput
from nanoserve.server.app import Serving, build_app
from tests.helpers.distributions import Distributions, distributions  # noqa: F401

GRAMMAR = '''
import threading
import time
from dataclasses import dataclass

from nanoserve.contracts.grammar import GrammarCompiler, GrammarSpec, Matcher
from nanoserve.hookspecs import hookimpl


@dataclass(frozen=True)
class Options:
    pass


class Anything(Matcher):
    """A form is ``X fails``, where X is the method that does, or ``SECONDS to compile``."""

    def __init__(self, form):
        self.form = form

    def run(self, where):
        if self.form == where + " fails":
            raise TypeError("provoked by the test")

    def fill_bitmask(self, row):
        row.fill_(-1)
        self.run("fill_bitmask")

    def accept(self, token_id):
        self.run("accept")

    @property
    def is_terminated(self):
        self.run("is_terminated")
        return False


class Compiler(GrammarCompiler):
    def __init__(self, options, context):
        self.built_by = threading.current_thread().name

    def compile(self, spec):
        if spec.text == "who":
            raise ValueError(f"built by {self.built_by}, compiled by {threading.current_thread().name}")
        if spec.text.endswith("to compile"):
            time.sleep(float(spec.text.split()[0]))
        Anything(spec.text).run("compile")
        return lambda: self.start(spec.text)

    def start(self, form):
        Anything(form).run("start")
        return Anything(form)


@hookimpl
def nanoserve_grammar(register):
    register(GrammarSpec("fragile", "for tests", Options, Compiler))
'''

SCHEDULER = """
from nanoserve.contracts.scheduling import SchedulerSpec
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.scheduler.decode_first import DecodeFirst, DecodeFirstOptions


class Urgent(DecodeFirst):
    uses_priority = True

    def schedule(self):
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda seq: seq.priority))
        return super().schedule()


@hookimpl
def nanoserve_scheduler(register):
    register(SchedulerSpec("urgent", "for tests", DecodeFirstOptions, Urgent))
"""

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "num_kv_blocks": 256, "debug": True}
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def form(text: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, ignore_eos=True, structured=StructuredOutput(regex=text), **more)


async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


@pytest.fixture
def serve(distributions: Distributions) -> Callable[..., Any]:  # noqa: F811
    """``serve(test, option=…)`` runs the coroutine ``test(llm)``."""
    distributions.install("fragile-grammar", {"grammar.fragile": "fragile_grammar"}, fragile_grammar=GRAMMAR)
    distributions.install("urgent-scheduler", {"scheduler.urgent": "urgent_scheduler"}, urgent_scheduler=SCHEDULER)

    def run(test: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def whole() -> None:
            async with AsyncLLM("tiny", **OPTIONS, **options) as llm:
                await test(llm)
                assert llm.num_sequences == 0
                async with asyncio.timeout(5):
                    while llm.metrics.running or llm.metrics.waiting:
                        await asyncio.sleep(0.01)
                assert llm.stats().num_free_blocks == llm.stats().num_blocks

        asyncio.run(whole())

    return run


def test_nobody_waits_for_the_grammar_of_another(serve: Any) -> None:
    """While forms are compiled, a stream goes on, and a request with a known form or none is served at once."""

    async def test(llm: AsyncLLM) -> None:
        await collect(llm.generate("x", form("0 to compile")))
        stream = llm.generate("import json\n", LONG)
        await anext(stream)
        begun = time.perf_counter()
        waiting = [asyncio.create_task(collect(llm.generate("x", form(f"2.{i} to compile")))) for i in range(2)]
        given_up = llm.generate("x", form("2 to compile", n=3))
        async with asyncio.timeout(1):
            while llm.metrics.waiting != 2 + 3:
                await asyncio.sleep(0.01)
        given_up.close()
        await collect(llm.generate("x", form("0 to compile")))
        gaps = []
        while time.perf_counter() - begun < 1.8:
            last = time.perf_counter()
            await anext(stream)
            gaps.append(time.perf_counter() - last)
        assert len(gaps) > 20 and max(gaps) < 0.7 and not any(task.done() for task in waiting)
        stream.close()
        for outputs in await asyncio.gather(*waiting):
            assert outputs[-1].finish_reason == "length" and time.perf_counter() - begun > 2
        assert llm.metrics.finished["abort"] == 3 + 1

    serve(test, grammar="fragile")


def test_a_server_builds_the_compiler_before_it_is_ready(serve: Any) -> None:
    """What it makes of a vocabulary may hold the interpreter lock for longer than a stream should wait."""

    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="structured.regex: built by MainThread, compiled by grammar_"):
            await collect(llm.generate("x", form("who")))

    serve(test, grammar="fragile")


def test_a_bug_of_a_grammar_plugin_is_a_500_with_its_name(serve: Any) -> None:
    """And nobody else notices. A form that is wrong is a 400."""

    async def test(llm: AsyncLLM) -> None:
        params = replace(LONG, max_tokens=300)
        expected = (await collect(llm.generate("import json\n", params, stream=False)))[0].token_ids
        other = asyncio.create_task(collect(llm.generate("import json\n", params, stream=False)))
        app = build_app(Serving(llm, "tiny", SamplingParams(), max_queue=10))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

            async def ask(regex: str) -> tuple[int, Any]:
                body = {"prompt": ["a", "b"], "guided_regex": regex, "ignore_eos": True}
                response = await client.post("/v1/completions", json=body)
                return response.status_code, response.json()["error"]

            assert (await ask("who"))[0] == 400
            for method in ("compile", "start", "accept", "is_terminated", "fill_bitmask"):
                status, error = await ask(f"{method} fails")
                assert status == 500, method
                assert "grammar=fragile of fragile-grammar 1.5" in error["message"], method
                assert "TypeError: provoked by the test" in error["message"]
        with pytest.raises(PluginError, match="grammar=fragile of fragile-grammar 1.5 failed in compile"):
            await collect(llm.generate("x", form("compile fails")))
        assert (await other)[0].token_ids == expected

    serve(test, grammar="fragile")


def test_a_priority_reaches_a_scheduler_that_uses_it(serve: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        ended: list[int] = []

        async def ask(priority: int) -> None:
            await collect(llm.generate("x", SamplingParams(max_tokens=20, ignore_eos=True), priority=priority))
            ended.append(priority)

        await asyncio.gather(*(ask(priority) for priority in (3, 2, -1, 1)))
        assert ended == [3, -1, 1, 2] or ended == [-1, 1, 2, 3]  # the first may have begun before the others came

    serve(test, scheduler="urgent", max_num_seqs=1)
