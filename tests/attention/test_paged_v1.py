import pytest

from nanoserve.testing import AttentionBackendSuite
from nanoserve_plugins.attention.paged_v1 import PagedV1Config


class TestPagedV1(AttentionBackendSuite):
    backend = "paged_v1"


@pytest.mark.parametrize("block_n", [0, 24, -32])
def test_refuses_tiles_that_are_no_power_of_two(block_n: int) -> None:
    with pytest.raises(ValueError, match="block_n must be a power of two"):
        PagedV1Config(block_n=block_n)
