import random

import pytest

from nanoserve.contracts.errors import ConfigError
from nanoserve.registry import Registry
from nanoserve.testing import AttentionBackendSuite
from nanoserve_plugins.attention.sdpa import group_by_length


class TestSDPA(AttentionBackendSuite):
    backend = "sdpa"


@pytest.mark.parametrize("max_tokens", [1, 300, 10**6])
def test_decode_groups_bound_padding_and_memory(max_tokens):
    rng = random.Random(max_tokens)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 5, 20, 100, 900]) for _ in range(rng.randint(1, 40))]
        groups = group_by_length(lengths, max_tokens)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            members = [lengths[row] for row in group]
            padded = max(members) * len(members)
            assert padded <= 2 * sum(members)
            assert padded <= max_tokens or len(group) == 1


def test_similar_contexts_stay_one_group_in_batch_order():
    assert group_by_length([30, 20, 40], 10**6) == [[0, 1, 2]]


def test_a_senseless_option_is_refused():
    registry = Registry.discover()
    with pytest.raises(ConfigError, match=r"attention\.max_gather_mb must be at least 1, not 0"):
        registry.make_options("attention", registry.get("attention", "sdpa"), {"max_gather_mb": 0})
