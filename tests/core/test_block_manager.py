import struct

import pytest
import xxhash

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import Status
from nanoserve.engine import block_manager
from nanoserve.engine.block_manager import AuditError, BlockManager, hash_block
from nanoserve.engine.sequence import Sequence
from nanoserve.testing.scheduler import SchedulerSuite


class DecodeFirst(SchedulerSuite):
    """For its harness: requests run on a device that notices every foreign, stale or unwritten KV entry."""

    scheduler = "decode_first"


def sequence(prompt, max_tokens=100):
    return Sequence("r", list(prompt), None, max_num_tokens=len(prompt) + max_tokens)


def prefill(blocks, seq, token=7, max_tokens=1000):
    """One step of ``seq``: granted and committed. Returns the number of tokens computed."""
    granted = blocks.grant(seq, max_tokens)
    assert granted
    blocks.commit(seq, [token] if seq.num_pending else [])
    blocks.audit()
    return granted


def finish(blocks, seq):
    seq.status = Status.FINISHED
    blocks.release(seq)
    blocks.audit()


def run(blocks, prompt, **options):
    """A request that is prefilled and ends. Returns its sequence."""
    seq = sequence(prompt)
    prefill(blocks, seq, **options)
    finish(blocks, seq)
    return seq


# --- hashing ---------------------------------------------------------------------------------------------------------


def test_the_hash_is_a_chain_over_fixed_width_integers():
    """C14 (b): blocks whose digits join to the same text differ, and so do equal blocks after different parents."""
    first = xxhash.xxh64(struct.pack("<Q2q", 0, 1, 23)).intdigest()
    assert hash_block(0, [1, 23]) == first
    assert hash_block(first, [4, 5]) == xxhash.xxh64(struct.pack("<Q2q", first, 4, 5)).intdigest()
    assert hash_block(0, [1, 23]) != hash_block(0, [12, 3])
    assert hash_block(1, [4, 5]) != hash_block(2, [4, 5])


@pytest.mark.parametrize(
    "collide", [lambda parent, tokens: 1, lambda parent, tokens: tokens[0]], ids=["everything", "without the parent"]
)
def test_a_collision_never_shares_kv(monkeypatch, collide):
    """C14 (a): all blocks, or equal ones after different parents, have one hash; the device would notice."""
    monkeypatch.setattr(block_manager, "hash_block", collide)
    harness = DecodeFirst.harness(num_blocks=30, block_size=4)
    for turn in range(2):
        for i in range(5):
            harness.add(f"{turn}{i}", [i] * 4 + [9] * 8, 6)
            harness.run()
    harness.finish()
    assert harness.blocks.prefix_hits > 0  # what did get into the table is still found


def test_blocks_with_equal_tokens_after_different_parents_are_different():
    blocks = BlockManager(20, 4)
    run(blocks, [1] * 4 + [9] * 8)
    assert run(blocks, [2] * 4 + [9] * 8).num_cached_tokens == 0
    assert run(blocks, [2] * 4 + [9] * 8).num_cached_tokens == 8


# --- the prefix cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_len", "cached"), [(16, 0), (32, 16), (33, 32), (48, 32)])
def test_at_least_one_token_is_recomputed(prompt_len, cached):
    """C11: without a query there are no logits, so the last block of a fully cached prompt is computed again."""
    harness = DecodeFirst.harness(num_blocks=20)
    for name, expected in (("cold", 0), ("warm", cached)):
        seq = harness.add(name, list(range(prompt_len)), 4)
        harness.run()
        assert seq.num_cached_tokens == expected
    harness.finish()


def test_an_overwritten_block_is_not_found():
    """C13 (a): Y overwrites all of X, so X runs as if for the first time."""
    harness = DecodeFirst.harness(num_blocks=6)
    for name, first in (("x", 0), ("y", 500), ("x again", 0)):
        seq = harness.add(name, list(range(first, first + 80)), 4)
        harness.run()
        assert seq.num_cached_tokens == 0
    assert harness.blocks.cache_evictions > 0
    harness.finish()


def test_of_two_equal_blocks_one_may_be_evicted():
    """C13 (b): two requests compute the same prompt in the same step; the copy that stays serves the next one."""
    blocks = BlockManager(8, 4)
    a, b = sequence(range(12)), sequence(range(12))
    for seq in (a, b):
        assert blocks.grant(seq, 100) == 12
    for seq in (a, b):
        blocks.commit(seq, [7])
    blocks.audit()
    finish(blocks, a)
    run(blocks, range(100, 117))  # five blocks: two unused ones and the three of a
    assert blocks.cache_evictions == 3
    finish(blocks, b)
    assert run(blocks, range(12)).num_cached_tokens == 8


def test_the_last_sampled_token_is_not_cached():
    """C13 (c): 20 + 12 tokens fill two blocks, but the KV of the 32nd was never computed."""
    harness = DecodeFirst.harness(num_blocks=6)
    first = harness.add("first turn", list(range(20)), 12)
    harness.run()
    assert len(first.token_ids) == 32
    second = harness.add("second turn", first.token_ids + [1, 2, 3, 4, 5], 4)
    harness.run()
    assert second.num_cached_tokens == 16
    harness.finish()


def test_only_committed_blocks_are_shared():
    """A step in flight may still fail: what it computes is found once it has been committed, not before."""
    blocks = BlockManager(20, 4)
    a, b, c = (sequence(range(12)) for _ in range(3))
    blocks.grant(a, 8)
    blocks.grant(a, 8)
    blocks.grant(b, 8)
    assert b.num_cached_tokens == 0
    blocks.commit(a, [])
    blocks.grant(c, 8)
    assert c.num_cached_tokens == 8
    blocks.audit()


def test_unused_blocks_go_first_then_the_least_recently_used_tails_before_heads():
    blocks = BlockManager(7, 4)
    old, recent = [1] * 8, [2] * 8

    def num_cached(prompt):
        return len(blocks._find_prefix(sequence([*prompt, 0])))

    run(blocks, old)
    run(blocks, recent)
    run(blocks, [3] * 9)  # the last three unused blocks, one of which is not full and so stays unused
    run(blocks, [*old, 0])  # takes that one, and makes old the most recent
    assert blocks.cache_evictions == 0
    run(blocks, [4] * 6)  # takes it as well, and the tail of recent
    assert blocks.cache_evictions == 1
    assert (num_cached(old), num_cached(recent)) == (2, 1)


def test_admission_counts_free_hits_once():
    """A hit that nobody owns leaves the free pool: hits and new blocks must fit together, exactly."""
    blocks = BlockManager(4, 4)
    run(blocks, range(12))
    other = sequence([50])
    prefill(blocks, other)  # holds the unused block
    again = sequence(range(13))  # three hits and one new block, but only three are free
    assert blocks.grant(again, 100) == 0
    finish(blocks, other)
    assert prefill(blocks, again) == 1
    assert again.num_cached_tokens == 12


def test_counters_count_each_request_once():
    """C51: ten equal prompts of 40 tokens hit 32 each after the first; recovery after preemption does not count."""
    blocks = BlockManager(10, 16)
    seqs = [run(blocks, range(40)) for _ in range(10)]
    assert [seq.num_cached_tokens for seq in seqs] == [0] + [32] * 9
    assert (blocks.prefix_queries, blocks.prefix_hits) == (400, 9 * 32)
    seq = sequence(range(1000, 1040))
    prefill(blocks, seq)
    blocks.release(seq)
    prefill(blocks, seq)
    assert seq.num_committed_tokens == 41 and seq.num_cached_tokens == 0
    assert (blocks.prefix_queries, blocks.prefix_hits) == (440, 9 * 32)


def test_unique_prompts_under_pressure_hit_nothing():
    """C51 with the load of C07."""
    harness = DecodeFirst.harness(num_blocks=12)
    seqs = [harness.add(str(i), [100 * i + j for j in range(40)], 60) for i in range(4)]
    harness.finish()
    assert harness.scheduler.num_preemptions > 0
    assert (harness.blocks.prefix_queries, harness.blocks.prefix_hits) == (160, 0)
    assert all(seq.num_cached_tokens == 0 for seq in seqs)


def test_without_prefix_caching_nothing_is_hashed_or_counted():
    blocks = BlockManager(10, 4, enable_prefix_caching=False)
    for _ in range(2):
        assert run(blocks, range(12)).num_cached_tokens == 0
    assert (blocks.prefix_queries, blocks.prefix_hits, blocks.cache_evictions) == (0, 0, 0)


# --- allocation and progress -----------------------------------------------------------------------------------------


def test_blocks_are_reserved_for_what_is_granted():
    blocks = BlockManager(10, 4)
    seq = sequence(range(10))
    for chunk, held in ((3, 1), (1, 1), (1, 2), (5, 3)):
        assert prefill(blocks, seq, max_tokens=chunk) == chunk
        assert len(seq.block_table) == held
    for context in range(11, 18):  # decode: a new block only when it crosses
        assert prefill(blocks, seq) == 1
        assert len(seq.block_table) == -(-context // 4)


def test_a_grant_shrinks_to_what_fits_or_changes_nothing():
    blocks = BlockManager(3, 4)
    seq, late = sequence(range(20)), sequence(range(5))
    assert blocks.grant(seq, 0) == 0
    assert (blocks.num_holding, blocks.num_rows, seq.num_cached_tokens) == (0, 0, -1)
    assert blocks.grant(seq, 100) == 12
    assert blocks.grant(late, 100) == 0 and blocks.grant(seq, 100) == 0
    assert (late.in_flight, late.table_row, seq.in_flight, blocks.num_holding) == (0, -1, 1, 1)
    blocks.audit()


def test_pending_tokens_with_two_steps_in_flight():
    blocks = BlockManager(10, 4)
    seq = sequence(range(6))
    steps = [blocks.grant(seq, 4), blocks.grant(seq, 4), blocks.grant(seq, 1)]
    assert steps == [4, 2, 1] and (seq.num_pending, seq.num_tokens, seq.num_computed_tokens) == (2, 8, 7)
    for sampled, pending in (([], 2), ([50], 1), ([51], 0)):
        blocks.commit(seq, sampled)
        blocks.audit()
        assert seq.num_pending == pending
    assert seq.token_ids == [0, 1, 2, 3, 4, 5, 50, 51] and seq.num_hashed_blocks == 1


@pytest.mark.parametrize("finished", [False, True])
def test_blocks_released_in_flight_come_back_at_the_last_commit(finished):
    blocks = BlockManager(10, 4)
    seq = sequence(range(8))
    blocks.grant(seq, 8)
    blocks.grant(seq, 1)
    seq.status = Status.FINISHED if finished else Status.WAITING
    blocks.release(seq)
    blocks.release(seq)
    assert seq.releasing and (blocks.num_free, blocks.num_releasing, blocks.num_holding) == (7, 3, 0)
    assert blocks.grant(seq, 1) == 0
    blocks.commit(seq, [] if finished else [50])
    blocks.audit()
    assert blocks.num_releasing == 3
    blocks.commit(seq, [] if finished else [51])
    blocks.audit()
    assert (blocks.num_free, blocks.num_releasing) == (10, 0)
    assert (seq.num_computed_tokens, seq.num_pending, seq.table_row, seq.block_table) == (0, 0, -1, [])
    assert seq.token_ids[8:] == ([] if finished else [50, 51])  # a preempted sequence keeps what it sampled
    assert run(blocks, range(9)).num_cached_tokens == 8


def test_a_failed_step_leaves_nothing_in_the_cache():
    """Neither the failed chunk nor the one computed on top of it is ever found; what came before is."""
    blocks = BlockManager(10, 4)
    seq = sequence(range(14))
    prefill(blocks, seq, max_tokens=4)
    blocks.grant(seq, 4)
    blocks.grant(seq, 4)
    blocks.discard(seq)
    finish(blocks, seq)
    blocks.commit(seq, [])
    blocks.audit()
    assert blocks.num_free == 10
    assert run(blocks, range(14)).num_cached_tokens == 4


def test_a_dropped_token_leaves_its_block_unhashed():
    """The second step filled a block with a token whose value the abort has thrown away."""
    blocks = BlockManager(10, 4)
    seq = sequence(range(3))
    blocks.grant(seq, 3)
    blocks.grant(seq, 1)
    finish(blocks, seq)
    blocks.commit(seq, [])
    blocks.commit(seq, [])
    blocks.audit()
    assert not blocks._prefixes


def test_sharing_sequences_free_independently():
    """C10 (viii)"""
    blocks = BlockManager(10, 4)
    run(blocks, range(8))
    a, b = sequence([*range(8), 20]), sequence([*range(8), 30])
    prefill(blocks, a)
    prefill(blocks, b)
    assert a.block_table[:2] == b.block_table[:2] and blocks.num_free == 6
    finish(blocks, a)
    assert blocks.num_free == 7
    finish(blocks, b)
    assert blocks.num_free == 10


def test_the_longest_sequence_fills_the_pool():
    """C01: no block is set aside, and the last token is sampled but never stored: 128 slots serve 129 tokens."""
    blocks = BlockManager(8, 16)
    assert blocks.max_num_tokens == 129
    assert blocks.grant(sequence(range(128)), 1000) == 128
    assert blocks.num_free == 0


@pytest.mark.parametrize(("num_blocks", "block_size", "key"), [(0, 16, "num_kv_blocks"), (8, 0, "block_size")])
def test_an_empty_pool_is_refused(num_blocks, block_size, key):
    with pytest.raises(ConfigError, match=key):
        BlockManager(num_blocks, block_size)


# --- rows of the block table -----------------------------------------------------------------------------------------


def test_the_device_learns_only_what_is_new():
    blocks = BlockManager(10, 4)
    run(blocks, range(8))
    blocks.take_table_updates()
    seq = sequence(range(14))
    blocks.grant(seq, 1)
    rows, columns, ids = blocks.take_table_updates()
    assert (rows, columns, ids) == ([0] * 3, [0, 1, 2], seq.block_table)  # two hits and a new one
    blocks.grant(seq, 1)
    assert blocks.take_table_updates() == ([], [], [])
    blocks.grant(seq, 3)
    assert blocks.take_table_updates() == ([0], [3], seq.block_table[3:])


def test_a_row_that_changes_hands_unseen_is_reported_once():
    """A launch that fails may leave updates behind; the next owner of the row must not be mixed up with the last."""
    blocks = BlockManager(10, 4)
    seqs = [sequence([i]) for i in range(3)]
    for seq in seqs:
        blocks.grant(seq, 1)
    assert [seq.table_row for seq in seqs] == [0, 1, 2] and blocks.num_rows == 3
    for seq in seqs[2:0:-1]:
        blocks.discard(seq)
        finish(blocks, seq)
    heir = sequence(range(6))
    blocks.grant(heir, 6)
    assert heir.table_row == 1 and blocks.num_rows == 3
    assert blocks.take_new_rows() == [seqs[0], heir]
    rows, columns, ids = blocks.take_table_updates()
    table = dict(zip(zip(rows, columns, strict=True), ids, strict=True))
    assert len(table) == len(ids)
    assert [table[1, 0], table[1, 1]] == heir.block_table
    assert blocks.take_new_rows() == []


# --- the audit -------------------------------------------------------------------------------------------------------


def lose_a_block(blocks, seq):
    blocks._unused.pop()


def free_a_block_twice(blocks, seq):
    blocks._unused.append(blocks._unused[-1])


def free_an_owned_block(blocks, seq):
    blocks._unused.append(seq.block_table[0])


def drop_a_reference(blocks, seq):
    blocks._refs[seq.block_table[0]] -= 1


def swap_blocks(blocks, seq):
    seq.block_table[0], seq.block_table[1] = seq.block_table[1], seq.block_table[0]


def forget_a_parent(blocks, seq):
    prefix = blocks._prefix_of[seq.block_table[0]]
    del blocks._prefixes[prefix.hash]
    blocks._prefix_of[seq.block_table[0]] = None


def keep_a_stale_hash(blocks, seq):
    blocks._prefix_of[seq.block_table[1]] = None


def lose_a_row(blocks, seq):
    seq.table_row = 5


def free_an_owned_row(blocks, seq):
    blocks._free_rows.append(seq.table_row)


def skip_a_token(blocks, seq):
    seq.num_computed_tokens += 1


def hold_a_block_too_many(blocks, seq):
    blocks._allocate(seq, 1)


def forget_a_step(blocks, seq):
    seq.in_flight += 1


def keep_a_pending_token(blocks, seq):
    seq.num_pending += 1


def hash_too_early(blocks, seq):
    seq.num_hashed_blocks += 1


def miscount_holders(blocks, seq):
    blocks._num_holding += 1


def miscount_releasing(blocks, seq):
    blocks._num_releasing += 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_a_block_twice,
        free_an_owned_block,
        drop_a_reference,
        swap_blocks,
        forget_a_parent,
        keep_a_stale_hash,
        lose_a_row,
        free_an_owned_row,
        skip_a_token,
        hold_a_block_too_many,
        forget_a_step,
        keep_a_pending_token,
        hash_too_early,
        miscount_holders,
        miscount_releasing,
    ],
)
def test_the_audit_sees(damage):
    blocks = BlockManager(12, 4)
    run(blocks, range(100, 108))
    seq = sequence(range(10))
    prefill(blocks, seq)
    damage(blocks, seq)
    with pytest.raises(AuditError):
        blocks.audit()
