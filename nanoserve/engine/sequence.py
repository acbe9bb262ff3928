"""One sequence: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from nanoserve.contracts.grammar import Matcher
from nanoserve.contracts.scheduling import Status
from nanoserve.sampling_params import SamplingParams


class Sequence:
    """The core's implementation of :class:`nanoserve.contracts.scheduling.Sequence`; see there for the fields.

    Beyond the contract:
    num_pending: tokens sampled on the device whose values have not arrived (at most one per step in flight).
    num_committed_tokens: those of num_computed_tokens whose step has been committed.
    step_tokens: tokens granted to each step in flight, oldest first; num_computed minus num_committed in total.
    num_cached_tokens: prompt tokens found in the prefix cache at first admission, -1 before.
    table_row: row in the device's block table, held exactly as long as blocks are held; -1 otherwise.
    block_hashes: chain hashes of its full blocks, as far as they have been needed; kept when blocks are freed.
    matcher: how far its output has come in the grammar it must follow; None without one.
    num_hashed_blocks: blocks at the head of block_table that are full, committed and offered to the prefix cache.
    """

    __slots__ = (
        "request_id",
        "index",
        "token_ids",
        "num_prompt_tokens",
        "num_pending",
        "num_computed_tokens",
        "num_committed_tokens",
        "step_tokens",
        "num_cached_tokens",
        "max_num_tokens",
        "params",
        "seed",
        "block_table",
        "block_hashes",
        "num_hashed_blocks",
        "table_row",
        "status",
        "in_flight",
        "releasing",
        "num_preemptions",
        "priority",
        "arrival_time",
        "stop_ids",
        "matcher",
        "state",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        max_num_tokens: int,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_pending = 0
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.step_tokens: list[int] = []
        self.num_cached_tokens = -1  # unknown until first admission
        self.max_num_tokens = max_num_tokens
        self.params = params
        self.seed = seed
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        self.num_hashed_blocks = 0
        self.table_row = -1
        self.status = Status.WAITING
        self.in_flight = 0
        self.releasing = False
        self.num_preemptions = 0
        self.priority = priority
        self.arrival_time = arrival_time
        self.stop_ids = stop_ids
        self.matcher = matcher
        self.state: object = None  # the engine's per-sequence output state

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}[{self.index}], {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens, {len(self.block_table)} blocks)"
        )
