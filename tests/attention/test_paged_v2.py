import pytest

from nanoserve.testing import AttentionBackendSuite
from nanoserve_plugins.attention.paged_v2 import PagedV2Config


class TestPagedV2(AttentionBackendSuite):
    backend = "paged_v2"


@pytest.mark.parametrize("block_n", [8, 48])
def test_refuses_tiles_that_tl_dot_refuses(block_n: int) -> None:
    with pytest.raises(ValueError, match="block_n must be a power of two from 16"):
        PagedV2Config(block_n=block_n)
