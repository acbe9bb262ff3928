"""A plugin that misbehaves: what the user is told, and what survives.

Plugins that do not load, clash or misspell a hook are in ``tests/core/test_registry.py``, schedulers that break a rule
in ``tests/core/test_engine.py``. Here are those that need something, come from another time, or fail while they run.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoserve.registry
from nanoserve import LLM, PluginError, SamplingParams
from nanoserve.contracts import CONTRACT_VERSION
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.observer import Observer
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import PluginWarning, Registry
from tests.helpers.distributions import SCHEDULER, Distributions
from tests.helpers.distributions import distributions as distributions

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def inline(kind: str, base: str, name: str, **methods: Any) -> types.SimpleNamespace:
    """A plugin that registers the built-in ``base`` as ``name``, with methods of its product replaced."""
    spec = Registry.discover().get(kind, base)

    def factory(*arguments: Any) -> Any:
        product = spec.factory(*arguments)
        broken = type("Broken", (type(product),), {"name": name, **methods})
        product.__class__ = broken
        return product

    @hookimpl
    def register_it(register: Any) -> None:
        from dataclasses import replace

        register(replace(spec, name=name, factory=factory))

    return types.SimpleNamespace(**{f"nanoserve_{kind}": register_it})


def llm(plugin: object, **options: Any) -> LLM:
    registry = Registry.discover(extra=[plugin])
    return LLM("tiny", registry=registry, **{"device": "cpu", "max_model_len": 256, "debug": True} | options)


@functools.cache
def good_text() -> str:
    with LLM("tiny", device="cpu", max_model_len=256) as engine:
        return engine.generate("import os\n", GREEDY)[0].text


# --- before it runs ------------------------------------------------------------------------------------------------


def test_a_missing_dependency_is_a_reason_to_refuse() -> None:
    from dataclasses import replace

    spec = Registry.discover().get("attention", "sdpa")
    needy = replace(spec, name="needy", capabilities=replace(spec.capabilities, requires=("no_such_package",)))

    @hookimpl
    def nanoserve_attention(register: Any) -> None:
        register(needy)

    plugin = types.SimpleNamespace(nanoserve_attention=nanoserve_attention)
    message = "attention=needy cannot run prefill here: needs the package 'no_such_package', which is not installed"
    with pytest.raises(PluginError, match=f"{message}. These would: .*sdpa"):
        llm(plugin, attention="needy")
    with llm(plugin) as engine:  # and nobody else is kept from running
        assert engine.generate("import os\n", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("stated", "moved", "sentence"),
    [
        (CONTRACT_VERSION + 1, False, "upgrade nanoserve, or install an older old-dist"),
        (CONTRACT_VERSION - 1, False, "upgrade old-dist, or install an older nanoserve"),
        (CONTRACT_VERSION - 1, True, "upgrade old-dist, or install an older nanoserve"),
        ("1.0", False, "not the number of a contract version"),
    ],
)
def test_a_plugin_for_other_contracts(distributions: Distributions, stated: object, moved: bool, sentence: str) -> None:
    """A sentence that names it, its version, ours and what to do: also if what it imports is not there any more."""
    source = SCHEDULER.format(name="old") + f"\nNANOSERVE_CONTRACT = {stated!r}\n"
    if moved:
        source = source.replace("import Schedule,", "import SomethingElse, Schedule,")
    distributions.install("old-dist", {"scheduler.old": "old_mod"}, old_mod=source)
    registry = Registry.discover()
    expected = f"'scheduler.old' of distribution old-dist 1.5 does not work.*{stated}.*{sentence}"
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match=expected):
        registry.get("scheduler", "old")
    assert registry.get("scheduler", "decode_first").name == "decode_first"


@pytest.mark.parametrize("statement", ["", f"\nNANOSERVE_CONTRACT = {CONTRACT_VERSION}\n"])
def test_a_plugin_for_our_contracts_loads(distributions: Distributions, statement: str) -> None:
    source = SCHEDULER.format(name="new") + statement
    distributions.install("new-dist", {"scheduler.new": "new_mod"}, new_mod=source)
    assert Registry.discover().get("scheduler", "new").name == "new"


def test_an_import_that_hangs_is_named(
    distributions: Distributions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import time; time.sleep(0.3)\n" + SCHEDULER.format(name="slow")
    distributions.install("slow-dist", {"scheduler.slow": "slow_mod"}, slow_mod=source)
    monkeypatch.setattr(nanoserve.registry, "SLOW_IMPORT", 0.05)
    assert Registry.discover().get("scheduler", "slow").name == "slow"
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'scheduler.slow' of distribution slow-dist 1.5 is still being imported after 0.05 s" in message
    assert "NANOSERVE_DISABLE_PLUGINS=scheduler.slow" in message


def test_ctrl_c_ends_an_import_that_hangs(tmp_path: Path, distributions: Distributions) -> None:
    source = "import sys, time\nprint('hanging', file=sys.stderr, flush=True)\ntime.sleep(600)"
    distributions.install("hang-dist", {"scheduler.hang": "hang_mod"}, hang_mod=source)
    code, err = interrupted("hanging", tmp_path, distributions.root, "scheduler=hang", "prompt=a")
    assert code == 130 and "Traceback" not in err


# --- while it runs -------------------------------------------------------------------------------------------------


def nothing_written(self, q, layer, meta, out):
    return torch.zeros_like(q)


def wrong_shape(self, q, layer, meta, out):
    out.copy_(torch.zeros(q.shape[0] + 1, *q.shape[1:]))


def third_call_fails(method: str, error: type[BaseException] = ZeroDivisionError) -> Any:
    def broken(self, *arguments, **keywords):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            raise error("in step 3")
        return getattr(super(type(self), self), method)(*arguments, **keywords)

    return broken


RUNTIME = {
    "returns its result": ("attention", "sdpa", {"decode": nothing_written}, "returned a Tensor; it must write to out"),
    "writes another shape": ("attention", "sdpa", {"decode": wrong_shape}, "attention=bad of.*RuntimeError"),
    "raises in step 3": (
        "attention",
        "sdpa",
        {"plan_decode": third_call_fails("plan_decode")},
        "attention=bad of.*step 3",
    ),
    "exits in step 3": (
        "attention",
        "sdpa",
        {"plan_decode": third_call_fails("plan_decode", SystemExit)},
        "attention=bad of.*SystemExit: in step 3",
    ),
    "raises in prefill": (
        "attention",
        "sdpa",
        {"plan_prefill": lambda self, meta: 1 / 0},
        "attention=bad of.*ZeroDivision",
    ),
    "cannot store": ("kvcache", "bf16", {"store": third_call_fails("store")}, "kv=bad of.*step 3"),
    "chooses nonsense": (
        "policy",
        "auto",
        {"select": lambda *_: "nobody"},
        "policy=bad of.*chose 'nobody' for prefill; it",
    ),
    "chooses a list": ("policy", "auto", {"select": lambda *_: ["sdpa"]}, r"policy=bad of.*chose \['sdpa'\]"),
}


@pytest.mark.parametrize("fault", RUNTIME)
def test_a_fault_in_a_step_ends_the_requests_of_that_step_and_names_the_plugin(fault: str) -> None:
    """C43, C48: every request gets an answer, no block is lost, and the engine serves the next request if it can."""
    kind, base, methods, message = RUNTIME[fault]
    group = "kv" if kind == "kvcache" else kind
    with llm(inline(kind, base, "bad", **methods), **{group: "bad"}, num_kv_blocks=40) as engine:
        outputs = engine.generate(["import os\n", "class A:\n"], GREEDY)
        for output in outputs:
            assert output.finish_reason == "error"
        assert_matches(message, outputs[0].outputs[0].error)
        assert engine.stats().num_free_blocks == 40 and engine.stats().running == engine.stats().waiting == 0
        again = engine.generate("import os\n", GREEDY)[0]
        if "3" in message:  # it fails once
            assert again.text == good_text()
        else:
            assert again.finish_reason == "error"


def test_an_observer_that_raises_is_dropped_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    """Reported once; the requests, and whoever else observes, go on."""

    class Counts(Observer):
        def __init__(self, fails: bool) -> None:
            self.fails, self.steps = fails, 0

        def step(self, *arguments: Any) -> None:
            self.steps += 1
            if self.fails and self.steps == 3:
                raise OSError("disk full")

    broken, good = Counts(fails=True), Counts(fails=False)

    def plugin(observer: Observer) -> object:
        @hookimpl
        def nanoserve_observer(engine_info: Any) -> Observer:
            return observer

        return types.SimpleNamespace(nanoserve_observer=nanoserve_observer)

    registry = Registry.discover(extra=[plugin(broken), plugin(good)])
    with LLM("tiny", registry=registry, device="cpu", max_model_len=256) as engine:
        assert engine.generate("import os\n", GREEDY)[0].text == good_text()
    assert broken.steps == 3 and good.steps == 6
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["observer Counts failed in step and is dropped"]


def assert_matches(pattern: str, text: str | None) -> None:
    import re

    assert text is not None and re.search(pattern, text), text


def other_dtype(self, layer, slots):
    return tuple(x.half() for x in super(type(self), self).gather(layer, slots))


CACHES = {
    "dtype": ({"gather": other_dtype}, r"kv=bad of .inline. 1: gather returned .*float16, not two tensors .*float32"),
    "shape": ({"gather": lambda self, layer, slots: (torch.zeros(3), torch.zeros(3))}, r"gather returned \[3\]"),
    "no pair": ({"gather": lambda self, layer, slots: None}, "gather returned NoneType, not two tensors"),
    "raises": ({"gather": lambda self, layer, slots: layer.nothing}, "gather failed: AttributeError"),
    "layers": ({"allocate": lambda self, n: None}, "allocate made 0 layers, the model has "),
    "bytes": ({"bytes_per_block": lambda self: 12.5}, "bytes_per_block returned 12.5, not a number of bytes"),
}


@pytest.mark.parametrize("fault", CACHES)
def test_a_format_that_answers_wrongly_is_refused_before_the_first_request(fault: str) -> None:
    methods, message = CACHES[fault]
    with pytest.raises(PluginError, match=f"kv=bad of .inline. 1: .*{message}" if "kv=" not in message else message):
        llm(inline("kvcache", "bf16", "bad", **methods), kv="bad", num_kv_blocks=40)


@pytest.mark.parametrize("error", [OSError("no disk"), SystemExit("no disk")], ids=repr)
def test_a_factory_that_raises_is_named(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that takes its time, while it does."""
    monkeypatch.setattr(nanoserve.registry, "SLOW_IMPORT", 0.05)
    plugin = inline("scheduler", "decode_first", "bad")
    plugin.nanoserve_scheduler = failing_factory(error)
    with pytest.raises(
        PluginError, match=rf"scheduler 'bad' .*\(inline\).*: its factory failed: {type(error).__name__}"
    ):
        llm(plugin, scheduler="bad")
    assert re.search(r"\(inline\).* is still building scheduler 'bad' after", caplog.text)


@pytest.mark.parametrize(
    ("kind", "base", "methods", "message"),
    [
        ("attention", "sdpa", {"decode": lambda self, q, meta, out: None}, r"decode\(q, meta, out\) must take 4"),
        ("kvcache", "bf16", {"store": lambda self, layer, k, v: None}, r"store\(layer, k, v\) must take 4"),
        (
            "kvcache",
            "bf16",
            {"norm_rope_store": lambda self: lambda layer, qkv: None},
            r"norm_rope_store\(\)\(layer, qkv\) must take 9",
        ),
        ("scheduler", "decode_first", {"schedule": lambda self, now: None}, r"schedule\(now\) must take 0"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_at_once(kind: str, base: str, methods: Any, message: str) -> None:
    group = "kv" if kind == "kvcache" else kind
    with pytest.raises(PluginError, match=f"{group}=bad of .inline. 1: {message}"):
        llm(inline(kind, base, "bad", **methods), **{group: "bad"})


def test_a_phase_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="phases: prefil is none; they are prefill, decode"):
        Capabilities(phases=frozenset({"prefil", "decode"}))  # type: ignore[arg-type]


def failing_factory(error: BaseException) -> Any:
    from dataclasses import replace

    spec = Registry.discover().get("scheduler", "decode_first")

    def factory(*_: Any) -> Any:
        time.sleep(0.2)
        raise error

    @hookimpl
    def nanoserve_scheduler(register: Any) -> None:
        register(replace(spec, name="bad", factory=factory))

    return nanoserve_scheduler


# --- hanging -------------------------------------------------------------------------------------------------------


def sleeps_once(self, meta):
    if not getattr(self, "slept", False):
        self.slept = True
        time.sleep(0.4)
    return super(type(self), self).plan_decode(meta)


def test_a_step_that_hangs_is_reported_with_the_plugin_it_hangs_in(caplog: pytest.LogCaptureFixture) -> None:
    """Once; and the step goes on when the plugin does."""
    with llm(inline("attention", "sdpa", "slow", plan_decode=sleeps_once), attention="slow") as engine:
        engine.engine.watchdog.limit = 0.1
        assert engine.generate("import os\n", GREEDY)[0].text == good_text()
    messages = [r.getMessage() for r in caplog.records if "has been running" in r.getMessage()]
    assert len(messages) == 1 and "in attention=slow of (inline) 1" in messages[0] and "Ctrl-C stops it" in messages[0]


def test_a_quick_engine_is_never_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Time between steps is the caller's."""
    caplog.set_level(logging.WARNING)
    with LLM("tiny", device="cpu", max_model_len=256) as engine:
        engine.generate("import os\n", GREEDY)
        engine.engine.watchdog.limit = 0.1
        time.sleep(0.3)
    assert not caplog.records


def test_ctrl_c_ends_a_step_that_hangs(tmp_path: Path, distributions: Distributions) -> None:
    source = SCHEDULER.format(name="hang").replace(
        "return Schedule()", "print('hanging', file=sys.stderr, flush=True); time.sleep(600)"
    )
    distributions.install("hang-dist", {"scheduler.hang": "hang_mod"}, hang_mod="import sys, time\n" + source)
    code, err = interrupted("hanging", tmp_path, distributions.root, "scheduler=hang", "prompt=a", "engine.device=cpu")
    assert code == 130 and "Traceback" not in err


def interrupted(sign: str, cwd: Path, site: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command that gets Ctrl-C as soon as it has printed ``sign``."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoserve", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if sign in line:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    return process.returncode, seen + rest
