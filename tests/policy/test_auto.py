import pytest

from nanoserve.config import PluginChoice, group_names, load_yaml
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.policy import SelectionShape
from nanoserve.registry import Registry
from nanoserve.testing import PolicySuite


def stored(name: str) -> dict:
    values = load_yaml("policy", name)
    assert values is not None and values.pop("name") == "auto"
    values.pop("by_device", None)  # the engine's affair
    return values


class TestAuto(PolicySuite):
    policy = "auto"
    options = stored("auto")


class TestRTX3060(PolicySuite):
    policy = "auto"
    options = stored("rtx3060")


class TestEmptyTable(PolicySuite):
    policy = "auto"


ALL = ("hopper_flash", "int8_fused", "paged_v1", "paged_v2", "paged_v2_split", "sdpa", "triton_flash", "triton_varlen")


def select(options: dict, phase: str, candidates: tuple[str, ...] = ALL, **shape) -> str:
    registry = Registry.discover()
    spec = registry.get("policy", "auto")
    policy = spec.factory(registry.make_options("policy", spec, options))
    defaults = {
        "batch": 8,
        "num_tokens": 64,
        "max_seqlen_q": 8,
        "max_context": 64,
        "kv_format": "bf16",
        "compute_capability": (8, 6),
    }
    return policy.select(phase, SelectionShape(**{**defaults, **shape}), candidates)


@pytest.mark.parametrize(
    "phase, shape, answer",
    [
        ("prefill", {"max_seqlen_q": 1}, "triton_varlen"),
        ("prefill", {"max_seqlen_q": 128}, "triton_varlen"),
        ("prefill", {"max_seqlen_q": 129}, "sdpa"),
        ("decode", {"max_context": 4095}, "paged_v2"),
        ("decode", {"max_context": 100}, "paged_v1"),
        ("decode", {"max_context": 4095, "kv_format": "int8"}, "int8_fused"),
    ],
)
def test_the_seeds_table(phase, shape, answer):
    assert select(stored("rtx3060"), phase, **shape) == answer


def test_auto_never_interprets_kernels_on_the_cpu():
    """With TRITON_INTERPRET=1 the Triton backends accept the CPU, where they are hundreds of times slower than sdpa."""
    for phase in ("prefill", "decode"):
        assert select(stored("auto"), phase, compute_capability=None) == "sdpa"
    assert select(stored("auto"), "prefill") == "hopper_flash"
    assert select(stored("auto"), "decode", kv_format="int8") == "paged_v2_split"


@pytest.mark.parametrize(
    "when, hits, misses",
    [
        ({"batch": {"min": 4, "max": 8}}, [{"batch": 4}, {"batch": 8}], [{"batch": 3}, {"batch": 9}]),
        ({"num_tokens": {"max": 64}}, [{"num_tokens": 64}], [{"num_tokens": 65}]),
        ({"kv_format": ["int8", "fp8"]}, [{"kv_format": "fp8"}], [{"kv_format": "bf16"}]),
        ({"has_prefix": False}, [{"has_prefix": False}], [{"has_prefix": True}]),
        ({"gpu": True}, [{"compute_capability": (7, 5)}], [{"compute_capability": None}]),
        (
            {"compute_capability": {"min": [9, 0], "max": [9, 9]}},
            [{"compute_capability": (9, 0)}],
            [{"compute_capability": (8, 9)}, {"compute_capability": (10, 0)}, {"compute_capability": None}],
        ),
        (
            {"batch": {"min": 8}, "max_context": {"max": 9}},
            [{"max_context": 9}],
            [{"batch": 7}, {"max_context": 10}],
        ),
    ],
)
def test_conditions(when, hits, misses):
    table = {"table": [{"phase": "decode", "when": when, "use": ["paged_v1"]}, {"phase": "decode", "use": ["sdpa"]}]}
    assert [select(table, "decode", **shape) for shape in hits] == ["paged_v1"] * len(hits)
    assert [select(table, "decode", **shape) for shape in misses] == ["sdpa"] * len(misses)


def test_unavailable_backends_are_passed_over():
    """The next of the row, then the next row, then the first candidate."""
    table = {"table": [{"phase": "decode", "use": ["a", "b"]}, {"phase": "decode", "use": ["c"]}]}
    assert select(table, "decode", ("b", "c")) == "b"
    assert select(table, "decode", ("d", "c")) == "c"
    assert select(table, "decode", ("e", "d")) == "e"


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"phase": "decod", "use": ["sdpa"]}, r"policy\.table\[0\]\.phase: 'decod' is not one of prefill, decode"),
        ({"phase": "decode", "use": ["sdpa"], "wen": {}}, r"policy\.table\[0\]\.wen: unknown option.*'when'"),
        ({"phase": "decode", "use": "sdpa"}, r"policy\.table\[0\]\.use: expected"),
        ({"phase": "decode", "use": []}, r"policy\.table\[0\].*name at least one backend"),
        ({"phase": "decode"}, r"policy\.table\[0\]\.use: a value is required"),
        ({"phase": "decode", "use": ["a"], "when": {"max_seqlen": {"max": 1}}}, r"when\.max_seqlen: unknown option"),
        ({"phase": "decode", "use": ["a"], "when": {"batch": {"max": "1"}}}, r"when\.batch\.max: expected int or null"),
        ({"phase": "decode", "use": ["a"], "when": {"batch": 1}}, r"when\.batch: expected"),
        ({"phase": "decode", "use": ["a"], "when": {"batch": {"min": 5, "max": 3}}}, r"min 5 is above max 3"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(row, complaint):
    with pytest.raises(ConfigError, match=complaint):
        select({"table": [row]}, "decode")


@pytest.mark.parametrize("name", group_names("policy"))
def test_stored_tables_choose_for_both_phases(name):
    """Every YAML of the group is a whole policy, and its backends exist or will be passed over."""
    choice = PluginChoice("auto", stored(name))
    for phase in ("prefill", "decode"):
        assert select(choice.options, phase, ("sdpa",)) == "sdpa"
