"""The far side's loop, alone: what it tells to a front that is slow to listen."""

from __future__ import annotations

import queue
import threading

import pytest
import zmq

from nanoserve.config import EngineConfig
from nanoserve.engine.build import build_engine
from nanoserve.sampling_params import SamplingParams
from nanoserve.server import engine_process
from nanoserve.server.messages import Ack, Add, Close, NewRequest, Step, decode_news, encode


class Outbox:
    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        news = decode_news(message)
        assert isinstance(news, Step)
        if news.has_reports:
            self.steps.put(news)


def tokens(step: Step) -> list[int]:
    deltas = [token for deltas in step.deltas for token in deltas.token_ids]
    return deltas + [token for report in step.reports for token in report.completions[0].token_ids]


def test_steps_are_told_as_one_while_the_front_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages may be unread; the engine does not wait for their readers, and nothing is lost."""
    monkeypatch.setattr(engine_process, "STATS_INTERVAL", 1e9)
    engine = build_engine(EngineConfig.from_kwargs(model="tiny", device="cpu", max_model_len=256))
    context, outbox = zmq.Context(), Outbox()
    front, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    front.bind("inproc://commands")
    inbox.connect("inproc://commands")
    loop = engine_process.EngineLoop(engine, inbox, outbox)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        front.send(encode(Add([NewRequest("a", [1, 2, 3], params, True, 0)])))
        told = [outbox.steps.get(timeout=20) for _ in range(2)]
        while engine.can_step:  # it ends all the same
            pass
        assert outbox.steps.empty()
        front.send(encode(Ack()))
        told.append(outbox.steps.get(timeout=20))
        assert [len(tokens(step)) for step in told] == [1, 1, 38]
        assert [[report.finished for report in step.reports] for step in told] == [[False], [], [True]]
        times = [deltas.time for step in told for deltas in step.deltas]
        assert len(times) == 38 and times == sorted(times)
        whole = engine.tokenizer.decode([token for step in told for token in tokens(step)], True)
        texts = ["".join([text for deltas in step.deltas for text in deltas.texts]) for step in told]
        assert texts[1] + texts[2] in whole and len(texts[2]) > 20
    finally:
        front.send(encode(Close()))
        thread.join()
        loop.close()
        engine.close()
        context.destroy(linger=0)
