"""AsyncLLM, for people who embed it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, AsyncLLM, SamplingParams
from nanoserve.async_llm import EngineDeadError
from nanoserve.contracts.errors import CapacityError, ConfigError, ModelLoadError, RequestError

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64, "debug": True}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=30, logprobs=1, ignore_eos=True)
PROMPT = "import json\n"


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def llm(run: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM("tiny", **OPTIONS)
    run(llm.start())
    yield llm
    run(llm.close())


@pytest.fixture(scope="module")
def expected() -> Any:
    with LLM("tiny", **OPTIONS) as llm:
        return llm.generate(PROMPT, PARAMS)[0]


async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


async def idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(5):
        while llm.num_sequences or llm.metrics.running or llm.metrics.waiting:
            await asyncio.sleep(0.01)
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_deltas_and_the_whole_are_those_of_llm(run: Any, llm: AsyncLLM, expected: Any) -> None:
    deltas = run(collect(llm.generate(PROMPT, PARAMS)))
    (whole,) = run(collect(llm.generate(PROMPT, PARAMS, stream=False)))
    assert "".join(d.text for d in deltas) == whole.text == expected.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids == expected.token_ids
    assert [entry.keys() for d in deltas for entry in d.logprobs] == [entry.keys() for entry in expected.logprobs]
    assert deltas[-1].finished and deltas[-1].finish_reason == whole.finish_reason == "length"
    assert whole.metrics.ttft > 0 and whole.prompt == PROMPT and whole.prompt_token_ids == expected.prompt_token_ids


@pytest.mark.parametrize("n", [1, 2])
def test_what_piles_up_comes_merged(run: Any, llm: AsyncLLM, n: int) -> None:
    async def late() -> list[Any]:
        stream = llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, n=n))
        while llm.stats().requests_finished == before:
            await asyncio.sleep(0.05)
        return await collect(stream)

    before = llm.stats().requests_finished
    (output,) = run(late())
    assert [c.index for c in sorted(output.outputs, key=lambda c: c.index)] == list(range(n))
    assert output.text == llm.tokenizer.decode(output.token_ids, True)
    assert all(len(c.token_ids) == 30 and c.finish_reason == "length" for c in output.outputs)


@pytest.mark.parametrize("how", ["break", "cancel", "close", "forget"])
def test_leaving_a_stream_aborts_the_request(run: Any, llm: AsyncLLM, how: str) -> None:
    params = SamplingParams(max_tokens=240, ignore_eos=True)

    async def leave() -> None:
        stream = llm.generate(PROMPT, params)
        await anext(stream)
        if how == "break":
            async for _ in stream:
                break
        elif how == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "close":
            await stream.aclose()
        del stream
        await idle(llm)

    before = llm.stats().requests_aborted
    run(leave())
    assert llm.stats().requests_aborted == before + 1


def test_refusals(run: Any, llm: AsyncLLM) -> None:
    async def ask(prompt: Any, params: Any = None) -> None:
        await collect(llm.generate(prompt, params))

    for prompt, error in (([5] * 300, CapacityError), ([], RequestError), ([4096], RequestError), (5, RequestError)):
        with pytest.raises(error):
            run(ask(prompt))
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        run(collect(llm.generate_many(["a", []], [SamplingParams(max_tokens=200)] * 2)))
    with pytest.raises(RequestError, match="SamplingParams"):
        run(ask("a", {"n": 1}))
    for params in (
        SamplingParams(max_tokens=2**64),
        SamplingParams(logit_bias={10**30: 1}),
        SamplingParams(stop="\ud800"),
    ):
        with pytest.raises(RequestError, match="SamplingParams"):
            run(ask("a", params))
    for priority in (1, "high", 2**70):  # the default scheduler uses none
        with pytest.raises(RequestError, match="priority"):
            run(collect(llm.generate("a", priority=priority)))  # type: ignore[arg-type]
    for messages in (None, [], [None], 5):
        with pytest.raises(RequestError, match="messages"):
            run(llm.render_chat(messages))  # type: ignore[arg-type]
    for num_top in (-1, 5000, 2**70, 1.5):
        with pytest.raises(RequestError, match="num_top"):
            run(llm.score("a b", num_top))
    run(idle(llm))


def test_a_stream_has_one_reader_and_ends_when_it_is_closed(run: Any, llm: AsyncLLM) -> None:
    async def two_tasks() -> None:
        stream = llm.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), stream=False)
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(stream)
        stream.close()
        assert await asyncio.wait_for(reader, 5) == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(two_tasks())
    run(idle(llm))


def test_whoever_closes_waits_for_the_end(run: Any) -> None:
    """The second of two who close may be the last of the program: what the engine held must be gone by then."""

    async def close_twice() -> None:
        llm = AsyncLLM("tiny", device="cpu")
        await llm.start()
        engine = llm._engine
        assert engine is not None
        first = asyncio.create_task(llm.close())
        await asyncio.sleep(0)
        await llm.close()
        assert not engine.alive and not Path(engine._folder).exists()
        await first

    run(close_twice())


def test_closing_while_starting_is_an_error_of_the_start(run: Any) -> None:
    async def close_early() -> None:
        llm = AsyncLLM("tiny", device="cpu")
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0.1)
        await llm.close()
        with pytest.raises(EngineDeadError):
            await starting
        assert llm.state == "closed"

    run(close_early())


def test_scores_while_others_generate(run: Any, llm: AsyncLLM) -> None:
    """A prompt is scored between steps; the generation beside it is what it is alone."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    ids = list(range(300, 540))

    async def both() -> Any:
        alone = await collect(llm.generate(PROMPT, params, stream=False))
        stream = llm.generate(PROMPT, params, stream=False)
        scores = await asyncio.gather(*(llm.score(ids, 2) for _ in range(5)), llm.score([1, 2, 3]))
        return alone[0].token_ids, (await collect(stream))[0].token_ids, scores

    alone, beside, scores = run(both())
    assert alone == beside
    assert (
        scores[0] == scores[4]
        and len(scores[0]) == 239
        and all(t in s for t, s in zip(ids[1:], scores[0], strict=True))
    )
    assert [set(entry) for entry in scores[5]] == [{2}, {3}]
    with pytest.raises(CapacityError):
        run(llm.score([5] * 300))
    run(idle(llm))


def test_what_keeps_an_engine_from_starting(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The other process's errors come over by name."""
    llm = AsyncLLM("tiny", device="cpu", max_model_len=100_000)
    with pytest.raises(EngineDeadError, match=r"not ready: new; enter `async with` or await start\(\) first"):
        llm.generate(PROMPT)
    with pytest.raises(ConfigError, match="max_model_len"):
        run(llm.start())
    assert llm.state == "dead" and llm._engine is not None
    run(llm._engine._gone.wait())
    assert "has ended" not in caplog.text, "it is refused, it has not crashed"
    run(llm.close())
    with pytest.raises(ConfigError, match="num_seq"):
        AsyncLLM("tiny", num_seqs=1)
    with pytest.raises(ModelLoadError):
        run(AsyncLLM(model={"name": "x", "path": "/nowhere"}, device="cpu").start())


UNGUARDED = """
import asyncio
from nanoserve import AsyncLLM

async def main():
    async with AsyncLLM("tiny", device="cpu"):
        pass

asyncio.run(main())
"""


def test_a_script_without_a_main_guard_is_told(tmp_path: Path) -> None:
    """The new process runs it once more; Python says so there, and here it says where to look."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    outcome = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 1 and "if __name__ == '__main__':" in outcome.stderr
    last = outcome.stderr.strip().splitlines()[-1]
    assert last.endswith("has ended with exit code 1, before it was ready; its standard error may say why")


def test_the_death_of_the_engine_is_an_error_of_every_stream(run: Any) -> None:
    async def die() -> None:
        async with AsyncLLM("tiny", **OPTIONS) as llm:
            stream = llm.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            os.kill(llm.engine_pid or 0, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="exit code -9"):
                await collect(stream)
            assert llm.state == "dead" and llm.num_sequences == 0
            with pytest.raises(EngineDeadError):
                llm.generate(PROMPT)

    run(die())
