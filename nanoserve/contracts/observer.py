"""Contract: an observer is told what happens, for metrics and tracing. It cannot change anything.

Methods run on the engine's thread between steps, so they must return at once. An observer that raises is reported
once, then dropped; the engine goes on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineInfo:
    """The composition of an engine: names of its plugins, its limits, the size of its KV pool.

    policy_origin: where the policy's options come from, in words: policy/NAME.yaml, options of its own, its defaults;
    or that it has no choice, since every phase has one backend.
    """

    model: str
    attention: dict[str, str]
    kv: str
    scheduler: str
    policy: str
    block_size: int
    num_blocks: int
    max_model_len: int
    grammar: str = ""
    policy_origin: str = ""


class Observer:
    """Override what you need. Times are seconds of ``time.perf_counter``."""

    def request_added(self, request_id: str, num_prompt_tokens: int, time: float) -> None: ...

    def first_token(self, request_id: str, time: float) -> None: ...

    def request_finished(self, request_id: str, finish_reason: str, num_output_tokens: int, time: float) -> None: ...

    def step(self, num_decode: int, num_prefill_tokens: int, num_free_blocks: int, time: float) -> None: ...
