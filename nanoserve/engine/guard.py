"""What a plugin may do wrong while an engine runs, and how a message finds out whose fault it is."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType

import torch

from nanoserve.contracts.attention import AttentionBackend
from nanoserve.contracts.errors import PluginError
from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.contracts.policy import SelectionPolicy
from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerLimits

log = logging.getLogger("nanoserve")

#: What a plugin's code may raise without ending more than what it was asked for: a library that calls sys.exit too.
FAULTS = (Exception, SystemExit)
COMPONENTS = (AttentionBackend, KVCacheFormat, Scheduler, SelectionPolicy)


def culprit(frames: Iterable[FrameType]) -> str:
    """The plugin whose method runs in the last of ``frames`` that belongs to one; "" if none does."""
    found = ""
    for frame in frames:
        component = frame.f_locals.get("self")
        if isinstance(component, COMPONENTS):
            found = component.plugin or type(component).__name__
    return found


def failure(error: BaseException) -> str:
    """What has failed, beginning with the plugin that it failed in."""
    where = culprit(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    what = f"{type(error).__name__}: {error}"
    return f"{where}: {what}" if where and where not in what else what


def broken_rule(schedule: object, limits: SchedulerLimits) -> str | None:
    """What is wrong with a scheduler's answer, as the rest of a sentence; None if it is a schedule that can run."""
    if not isinstance(schedule, Schedule):
        return f"returned {type(schedule).__name__}, not a Schedule"
    chosen = [*schedule.decode, *(seq for seq, _ in schedule.prefill)]
    if len(chosen) > 1 and len(set(map(id, chosen))) != len(chosen):
        return "chose a sequence twice in one step"
    if len(chosen) > limits.max_num_seqs:
        return f"chose {len(chosen)} sequences for one step, and max_num_seqs is {limits.max_num_seqs}"
    num_tokens = len(schedule.decode) + sum([count for _, count in schedule.prefill])
    if num_tokens > limits.max_num_batched_tokens:
        return f"chose {num_tokens} tokens for one step, and max_num_batched_tokens is {limits.max_num_batched_tokens}"
    if not all(seq.block_table for seq in chosen):  # type: ignore[attr-defined]
        return "chose a sequence that it had not granted tokens (Blocks.grant)"
    return None


def check_methods(component: object, arguments: Mapping[str, int]) -> None:
    """Raise PluginError unless each method of ``component`` can be called with so many arguments."""
    who = getattr(component, "plugin", "") or type(component).__name__
    for name, count in arguments.items():
        _check_call(who, name, getattr(component, name), count)


def _check_call(who: str, name: str, function: Callable[..., object], count: int) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise PluginError(f"{who}: {name}{signature} must take {count} arguments: {error}") from None


def check_cache(kv: KVCacheFormat) -> None:
    """Ask a fresh cache for two tokens. Raises PluginError for an answer of another shape or dtype than promised."""
    check_methods(kv, {"store": 4, "gather": 2})
    if (fused := kv.norm_rope_store()) is not None:
        _check_call(kv.plugin, "norm_rope_store()", fused, 9)
    shape = kv.shape
    if len(kv.layers) != shape.num_layers:
        raise PluginError(f"{kv.plugin}: allocate made {len(kv.layers)} layers, the model has {shape.num_layers}")
    try:
        answer = kv.gather(kv.layers[0], torch.zeros(2, dtype=torch.int32, device=shape.device))
    except FAULTS as error:
        raise PluginError(f"{kv.plugin}: gather failed: {type(error).__name__}: {error}") from error
    expected = f"two tensors [2, {shape.num_kv_heads}, {shape.head_dim}] {shape.dtype}"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise PluginError(f"{kv.plugin}: gather returned {type(answer).__name__}, not {expected}")
    for x in answer:
        right = isinstance(x, torch.Tensor) and x.dtype == shape.dtype
        if not right or x.shape != (2, shape.num_kv_heads, shape.head_dim):
            got = f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise PluginError(f"{kv.plugin}: gather returned {got}, not {expected}")


def block_bytes(kv: KVCacheFormat) -> int:
    """``kv.bytes_per_block()``, which the pool is sized with. Raises PluginError if it is no size."""
    size = kv.bytes_per_block()
    if type(size) is not int or size < 1:
        raise PluginError(f"{kv.plugin}: bytes_per_block returned {size!r}, not a number of bytes")
    return size


class Watchdog:
    """Around each step: one that lasts longer than ``limit`` seconds is reported once, with the plugin it hangs in.

    Nothing is interrupted, since a first step may compile kernels for minutes; Ctrl-C is the user's to press. A daemon
    thread looks at the clock, so that a step costs a few assignments.
    """

    def __init__(self, plugins: str, limit: float = 30.0) -> None:
        self.plugins = plugins
        self.limit = limit
        self._started = 0.0  # of the step that runs; 0 between steps
        self._owner = 0  # thread that runs it
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._owner = threading.get_ident()
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True)
            self._thread.start()
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.rest()

    def rest(self) -> None:
        """No step runs."""
        self._started = 0.0

    def close(self) -> None:
        self._closed.set()

    def look(self, reported: float) -> float:
        """Report the running step if it is late and not the one ``reported`` already; the start of the one reported."""
        started = self._started
        if not started or started == reported or time.monotonic() - started < self.limit:
            return reported
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(self._owner))]
        where = culprit(reversed(frames)) or "no plugin's code: the device may be busy"
        log.warning(
            "a step has been running for %.0f s, in %s (plugins: %s); Ctrl-C stops it",
            time.monotonic() - started, where, self.plugins,
        )  # fmt: skip
        return started


def _watch(watchdog: weakref.ref[Watchdog], closed: threading.Event) -> None:
    """Until the watchdog is closed or forgotten together with its engine."""
    reported, pause = 0.0, 0.0
    while not closed.wait(pause):
        dog = watchdog()
        if dog is None:
            return
        reported, pause = dog.look(reported), dog.limit / 4
        del dog


def wrote_out(backend: AttentionBackend, returned: object) -> None:
    """Raise PluginError for a backend that returns its result: it must be written to ``out``, which holds garbage."""
    if returned is not None:
        raise PluginError(
            f"{backend.plugin or type(backend).__name__} returned a {type(returned).__name__}; it must write to out"
        )
