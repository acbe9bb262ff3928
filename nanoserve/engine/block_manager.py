"""Who owns which block of the KV cache: allocation, the prefix cache, and the rows of the device's block table.

A block is in one of three places::

    unused  ──allocate──►  owned (refs ≥ 1)  ──last owner frees──►  cached, owned by nobody (least recently used first)
       ▲                        │        ▲                                │         │
       └──── its content was never hashed      └───── prefix hit ─────────┘         └─ allocate: evicted, then owned

Sequences own blocks, several may own one. A full block whose KV is computed is *hashed*: it enters the prefix cache and
stays there, owned or not, until it is allocated anew. Unused blocks are handed out before cached ones.

Progress is counted twice, because steps overlap: ``num_computed_tokens`` moves when a step is scheduled (``grant``),
``num_committed_tokens`` when its result has arrived (``commit``). Only committed tokens are hashed.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict

import xxhash

from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.contracts.scheduling import Blocks
from nanoserve.engine.sequence import Sequence

#: ``num_hashed_blocks`` of a sequence that must not be hashed any more.
_NEVER = 1 << 62


class AuditError(NanoserveError, AssertionError):
    """The block manager's books do not balance: a bug in the engine or in a scheduler plugin."""


def hash_block(parent_hash: int, token_ids: list[int]) -> int:
    """xxhash64 of a full block, chained: it encodes the whole path from the first token. Fixed-width little-endian."""
    return xxhash.xxh64_intdigest(struct.pack(f"<Q{len(token_ids)}q", parent_hash, *token_ids))


class _Prefix:
    """One entry of the prefix cache: ``tokens`` of a full block after those of ``parent`` (None: at the start).

    blocks: every block with this content; two sequences that compute the same prompt at the same time give two.
    The blocks of an entry are never all evicted before those of its children, because a sequence owns whole paths and
    frees them from the tail: every entry can be reached.
    """

    __slots__ = ("hash", "parent", "tokens", "blocks")

    def __init__(self, hash: int, parent: _Prefix | None, tokens: list[int]) -> None:
        self.hash = hash
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[int] = []

    def is_(self, parent: _Prefix | None, tokens: list[int]) -> bool:
        """Equal hashes prove nothing; the same tokens after the same parent do."""
        return self.parent is parent and self.tokens == tokens


class BlockManager(Blocks):
    """See :class:`nanoserve.contracts.scheduling.Blocks` for ``grant`` and ``release``, which schedulers call.

    The engine calls ``commit`` (or ``discard``) once per sequence and step, in the order of the steps, and after each
    ``schedule()`` takes what changed since the last one: ``take_new_rows``, ``take_table_updates`` and
    ``take_spoiled``. Host work per step is proportional to sequences and new blocks, never to context length.

    prefix_queries, prefix_hits: prompt tokens looked up and found, once per sequence. cache_evictions: hashed blocks
    allocated anew.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        for name, value in (("num_kv_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.cache_evictions = 0
        self._spoiled: set[int] = set()
        self._start_books()

    def _start_books(self) -> None:
        self._num_releasing = 0
        self._num_holding = 0
        self._refs = [0] * self.num_blocks
        self._unused = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, _Prefix] = OrderedDict()  # free and hashed, least recently used first
        self._prefixes: dict[int, _Prefix] = {}
        self._prefix_of: list[_Prefix | None] = [None] * self.num_blocks
        self._row_owners: list[Sequence | None] = []
        self._free_rows: list[int] = []
        self._new_rows: dict[int, Sequence] = {}
        self._updates: dict[tuple[int, int], int] = {}
        self._to_clear: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._cached)

    @property
    def num_releasing(self) -> int:
        return self._num_releasing

    @property
    def num_holding(self) -> int:
        return self._num_holding

    @property
    def max_num_tokens(self) -> int:
        """Length of the longest sequence that the pool can serve alone: the KV of its last token is never stored."""
        return self.num_blocks * self.block_size + 1

    @property
    def num_rows(self) -> int:
        """Rows of the block table ever used at once: a table of so many rows holds every ``table_row``."""
        return len(self._row_owners)

    # --- for schedulers ----------------------------------------------------------------------------------------

    def grant(self, seq: Sequence, max_tokens: int) -> int:  # type: ignore[override]  # there are no other sequences
        table = seq.block_table
        if not table:
            return self._admit(seq, max_tokens)
        computed = seq.num_computed_tokens
        num_tokens = len(seq.token_ids) + seq.num_pending
        n = num_tokens - computed
        if n > max_tokens:
            n = max_tokens
        missing = computed + n - len(table) * self.block_size
        if missing > 0:
            num_new = min(-(-missing // self.block_size), self.num_free)
            n = min(n, (len(table) + num_new) * self.block_size - computed)
        if n <= 0 or seq.releasing:
            return 0
        if missing > 0:
            self._allocate(seq, num_new)
        computed += n
        seq.num_computed_tokens = computed
        if computed == num_tokens:
            seq.num_pending += 1
        seq.in_flight += 1
        seq.step_tokens.append(n)
        return n

    def release(self, seq: Sequence) -> None:  # type: ignore[override]
        if seq.releasing or not seq.block_table:
            return
        self._num_holding -= 1
        if seq.in_flight:
            seq.releasing = True
            self._num_releasing += len(seq.block_table)
        else:
            self._free(seq)

    # --- for the engine ----------------------------------------------------------------------------------------

    def commit(self, seq: Sequence, token_ids: list[int]) -> None:
        """The oldest step in flight of ``seq`` is done and brought ``token_ids`` (empty: unfinished chunk, or dropped).

        Appends the values, hashes the blocks that are full now, and frees the blocks if the sequence was released
        meanwhile. For a finished sequence pass an empty list: what it sampled is dropped.
        """
        committed = seq.num_committed_tokens + seq.step_tokens.pop(0)
        seq.num_committed_tokens = committed
        seq.in_flight -= 1
        # Every earlier step has delivered its token, so this one sampled exactly if it had computed all known tokens.
        if committed == len(seq.token_ids):
            seq.num_pending -= 1
        if token_ids:
            seq.token_ids += token_ids
        if committed >= (seq.num_hashed_blocks + 1) * self.block_size:
            self._hash_full_blocks(seq)
        if seq.releasing and not seq.in_flight:
            self._num_releasing -= len(seq.block_table)
            self._free(seq)

    def discard(self, seq: Sequence) -> None:
        """As ``commit(seq, [])`` for a step that failed: its KV does not exist, so nothing of it may ever be found.

        The sequence has to end: it is not hashed any more, whatever else of it is in flight.
        """
        seq.num_hashed_blocks = _NEVER
        self.commit(seq, [])

    def spoil(self, seq: Sequence) -> None:
        """What ``seq`` has stored may not be finite: each of its blocks is to be cleared before it has a new owner."""
        self._spoiled.update(seq.block_table)

    def reset(self) -> None:
        """Begin anew: no block has an owner or is cached. For books that may be torn; no sequence may be used again."""
        self._spoiled = set(range(self.num_blocks))  # whatever the steps that nobody has read have stored
        self._start_books()

    def take_spoiled(self) -> list[int]:
        """Blocks given to new owners since the last call that are to be cleared before the next step."""
        taken, self._to_clear = self._to_clear, []
        return taken

    def take_new_rows(self) -> list[Sequence]:
        """Sequences that were given the ``table_row`` they hold since the last call."""
        taken, self._new_rows = self._new_rows, {}
        return list(taken.values())

    def take_table_updates(self) -> tuple[list[int], list[int], list[int]]:
        """New entries of the block table since the last call: (rows, columns, block ids). No entry appears twice."""
        taken, self._updates = self._updates, {}
        return [row for row, _ in taken], [column for _, column in taken], list(taken.values())

    # --- inside ------------------------------------------------------------------------------------------------

    def _admit(self, seq: Sequence, max_tokens: int) -> int:
        """First grant of a new or preempted sequence: claim its cached prefix, then as long a chunk as fits.

        A hit on a block that nobody owns takes it out of the free pool, so hits and new blocks must fit together.
        """
        free = self.num_free
        if not free or max_tokens <= 0:
            return 0
        refs = self._refs
        hits = self._find_prefix(seq) if self.enable_prefix_caching else []
        num_cached = len(hits) * self.block_size
        available = free - sum(not refs[block] for block in hits)
        n = min(max_tokens, len(seq.token_ids) - num_cached, available * self.block_size)
        if n <= 0:
            return 0
        if seq.num_cached_tokens < 0:  # first admission; recovery after preemption is not counted
            seq.num_cached_tokens = num_cached
            if self.enable_prefix_caching:
                self.prefix_queries += seq.num_prompt_tokens
                self.prefix_hits += num_cached
        if not self._free_rows:
            self._free_rows.append(len(self._row_owners))
            self._row_owners.append(None)
        seq.table_row = row = self._free_rows.pop()
        self._row_owners[row] = self._new_rows[row] = seq
        self._num_holding += 1
        for block in hits:
            if not refs[block]:
                del self._cached[block]
            self._append_block(seq, block)
        seq.num_computed_tokens = seq.num_committed_tokens = num_cached
        seq.num_hashed_blocks = len(hits)
        self._allocate(seq, -(-n // self.block_size))
        seq.num_computed_tokens += n
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.num_pending = 1
        seq.in_flight = 1
        seq.step_tokens.append(n)
        return n

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix. The last token is left out: without computing it there are no logits."""
        found: list[int] = []
        parent = None
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            tokens, hash = self._hash(seq, i)
            prefix = self._prefixes.get(hash)
            if prefix is None or not prefix.is_(parent, tokens):
                break
            found.append(prefix.blocks[-1])
            parent = prefix
        return found

    def _hash(self, seq: Sequence, i: int) -> tuple[list[int], int]:
        """Tokens and chain hash of its ``i``-th block; the hashes before it have been computed."""
        hashes = seq.block_hashes
        tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
        if i == len(hashes):
            hashes.append(hash_block(hashes[-1] if hashes else 0, tokens))
        return tokens, hashes[i]

    def _hash_full_blocks(self, seq: Sequence) -> None:
        first = seq.num_hashed_blocks
        # An aborted sequence may have computed a token whose value was dropped.
        seq.num_hashed_blocks = min(seq.num_committed_tokens, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching:
            return
        table = seq.block_table
        for i in range(first, seq.num_hashed_blocks):
            parent = self._prefix_of[table[i - 1]] if i else None
            tokens, hash = self._hash(seq, i)
            if i and parent is None:
                continue  # its parent met a collision, so it could not be found either
            prefix = self._prefixes.get(hash)
            if prefix is None:
                prefix = self._prefixes[hash] = _Prefix(hash, parent, tokens)
            elif not prefix.is_(parent, tokens):
                continue  # a collision: the block stays private to its owner
            prefix.blocks.append(table[i])
            self._prefix_of[table[i]] = prefix

    def _allocate(self, seq: Sequence, num_new: int) -> None:
        for _ in range(num_new):
            if self._unused:
                block = self._unused.pop()
            else:
                block, prefix = self._cached.popitem(last=False)
                self.cache_evictions += 1
                prefix.blocks.remove(block)
                if not prefix.blocks:
                    del self._prefixes[prefix.hash]
                self._prefix_of[block] = None
            if block in self._spoiled:
                self._spoiled.remove(block)
                self._to_clear.append(block)
            self._append_block(seq, block)

    def _append_block(self, seq: Sequence, block: int) -> None:
        self._updates[seq.table_row, len(seq.block_table)] = block
        seq.block_table.append(block)
        self._refs[block] += 1

    def _free(self, seq: Sequence) -> None:
        """Give blocks and row back, tail first so that tails are evicted before heads; the sequence starts anew."""
        refs = self._refs
        for block in reversed(seq.block_table):
            refs[block] -= 1
            if not refs[block]:
                prefix = self._prefix_of[block]
                if prefix is None:
                    self._unused.append(block)
                else:
                    self._cached[block] = prefix
        seq.block_table.clear()
        self._free_rows.append(seq.table_row)
        self._row_owners[seq.table_row] = None
        self._new_rows.pop(seq.table_row, None)
        seq.table_row = -1
        seq.num_computed_tokens = seq.num_committed_tokens = seq.num_hashed_blocks = seq.num_pending = 0
        seq.releasing = False

    # --- integrity ---------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raise :class:`AuditError` unless the books balance."""
        holders, free_rows = [], Counter(self._free_rows)
        for row, owner in enumerate(self._row_owners):
            _require(free_rows[row] == (owner is None), f"row {row} of {owner} is {free_rows[row]} times free")
            if owner is not None:
                _require(owner.table_row == row, f"row {row} belongs to {owner}, which has row {owner.table_row}")
                holders.append(owner)
        self._audit_blocks(holders)
        self._audit_prefixes()
        for seq in holders:
            self._audit_sequence(seq)
        releasing = sum(len(seq.block_table) for seq in holders if seq.releasing)
        _require(self.num_releasing == releasing, f"num_releasing is {self.num_releasing}, not {releasing}")
        holding = sum(not seq.releasing for seq in holders)
        _require(self.num_holding == holding, f"num_holding is {self.num_holding}, not {holding}")

    def _audit_blocks(self, holders: list[Sequence]) -> None:
        owners = Counter(block for seq in holders for block in seq.block_table)
        free = Counter(self._unused)
        free.update(self._cached.keys())
        for block in range(self.num_blocks):
            refs, hashed = self._refs[block], self._prefix_of[block] is not None
            _require(refs == owners[block], f"block {block} has {refs} references and {owners[block]} owners")
            _require(free[block] == (refs == 0), f"block {block} with {refs} references is {free[block]} times free")
            _require(refs > 0 or hashed == (block in self._cached), f"free block {block} is in the wrong pool")
        _require(free.keys() | owners.keys() <= set(range(self.num_blocks)), "a block id outside the pool")

    def _audit_prefixes(self) -> None:
        num_entries = 0
        for hash, prefix in self._prefixes.items():
            _require(bool(prefix.blocks) and prefix.hash == hash, f"prefix entry {hash} is stale")
            _require(len(prefix.tokens) == self.block_size, f"prefix entry {hash} is not a full block")
            for block in prefix.blocks:
                _require(self._prefix_of[block] is prefix, f"block {block} is found under a hash that is not its own")
            parent = prefix.parent
            reachable = parent is None or self._prefixes.get(parent.hash) is parent
            _require(reachable, f"prefix entry {hash} outlived its parent")
            num_entries += len(prefix.blocks)
        num_hashed = sum(prefix is not None for prefix in self._prefix_of)
        _require(num_entries == num_hashed, f"{num_entries} blocks in the prefix cache, {num_hashed} blocks hashed")

    def _audit_sequence(self, seq: Sequence) -> None:
        size, computed, committed = self.block_size, seq.num_computed_tokens, seq.num_committed_tokens
        _require(len(seq.block_table) == -(-computed // size), f"{seq} holds blocks for other tokens than its own")
        _require(computed > 0, f"{seq} has a row and no tokens")
        _require(computed == committed + sum(seq.step_tokens), f"{seq} has {committed} tokens committed")
        _require(seq.in_flight == len(seq.step_tokens), f"{seq} is {seq.in_flight} times in flight")
        _require(0 <= seq.num_pending <= seq.in_flight, f"{seq} has {seq.num_pending} pending tokens")
        _require(not seq.releasing or seq.in_flight > 0, f"{seq} should have been freed")
        if seq.num_hashed_blocks == _NEVER:
            return
        _require(
            seq.num_hashed_blocks * size <= committed, f"{seq} has {seq.num_hashed_blocks} blocks hashed, not committed"
        )
        parent = None
        for i in range(seq.num_hashed_blocks):
            prefix = self._prefix_of[seq.block_table[i]]
            known = prefix is None or prefix.is_(parent, seq.token_ids[i * size : (i + 1) * size])
            _require(known, f"block {i} of {seq} is cached with other tokens")
            parent = prefix


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AuditError(message)
