import pytest
import torch

from nanoserve.contracts.errors import ConfigError
from nanoserve.testing import KVCacheFormatSuite


class TestBF16(KVCacheFormatSuite):
    format = "bf16"


class TestBF16Narrow(KVCacheFormatSuite):
    """Storage narrower than some compute dtypes: lossy for float32, by half an ulp."""

    format = "bf16"
    options = {"dtype": "bfloat16"}

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().abs() * torch.finfo(torch.bfloat16).eps / 2


class Formats(KVCacheFormatSuite):
    format = "bf16"
    __test__ = False


@pytest.mark.parametrize(
    "storage, compute, bytes_per_element, exact",
    [
        ("auto", "float32", 4, True),
        ("auto", "bfloat16", 2, True),
        ("float16", "float32", 2, False),
        ("float32", "bfloat16", 4, True),
        ("float16", "bfloat16", 2, False),
    ],
)
def test_storage_follows_the_compute_dtype_unless_set(storage, compute, bytes_per_element, exact):
    formats = Formats()
    formats.options = {"dtype": storage}
    kv = formats.build(compute, num_kv_heads=2, head_dim=32, block_size=16)
    assert kv.bytes_per_block() == 2 * 2 * 32 * 16 * bytes_per_element
    assert kv.exact == exact


def test_an_unknown_storage_dtype_is_refused():
    """C18."""
    formats = Formats()
    formats.options = {"dtype": "int7"}
    with pytest.raises(ConfigError, match=r"kv\.dtype: 'int7' is not one of auto, bfloat16"):
        formats.build()
