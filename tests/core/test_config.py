"""The strict builder, the engine's options, and the keywords of ``LLM`` (C46)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from nanoserve.config import (
    CONFIG_PATHS,
    DEFAULTS,
    PLUGIN_GROUPS,
    EngineConfig,
    EngineOptions,
    FreeText,
    PluginChoice,
    build,
    config_folders,
    group_names,
    load_yaml,
)
from nanoserve.contracts.errors import ConfigError
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Options:
    count: int = 1
    ratio: float = 0.5
    on: bool = False
    mode: Literal["fast", "exact"] = "fast"
    limit: int | None = None
    label: str | None = None
    text: FreeText | None = None
    sizes: list[int] = field(default_factory=list)
    pair: tuple[int, float] = (1, 1.0)
    bounds: tuple[int, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    by_id: dict[int, float] | None = None
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    any_of: str | list[str] | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must not be negative")


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("count", 4, 4),
        ("ratio", 2, 2.0),
        ("on", True, True),
        ("mode", "exact", "exact"),
        ("limit", None, None),
        ("limit", 3, 3),
        ("label", "x", "x"),
        ("text", "None", "None"),
        ("sizes", [1, 2], [1, 2]),
        ("pair", [2, 3], (2, 3.0)),
        ("bounds", [1, 2, 3], (1, 2, 3)),
        ("table", {"a": 1}, {"a": 1}),
        ("by_id", {"5": 1, 6: 2.5}, {5: 1.0, 6: 2.5}),
        ("inner", {"depth": 2}, Inner(2)),
        ("any_of", "a", "a"),
        ("any_of", ["a", "b"], ["a", "b"]),
    ],
)
def test_right_values(key: str, value: Any, result: Any) -> None:
    built = getattr(build(Options, {key: value}, "kv"), key)
    assert built == result and type(built) is type(result)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, r"kv.cuont: unknown option of kv=mine; it has: count, .*; did you mean 'count'\?"),
        ({"count": 4.0}, "kv.count: expected int, got 4.0"),
        ({"count": "4"}, "kv.count: expected int, got '4'"),
        ({"count": True}, "kv.count: expected int, got True"),
        ({"count": None}, "kv.count: expected int, got None"),
        ({"count": -1}, "kv.count must not be negative"),
        ({"ratio": "0.5"}, "kv.ratio: expected float"),
        ({"ratio": True}, "kv.ratio: expected float"),
        ({"on": 1}, "kv.on: expected bool, got 1"),
        ({"on": "yes"}, "kv.on: expected bool"),
        ({"mode": "exakt"}, "kv.mode: 'exakt' is not one of fast, exact; did you mean 'exact'"),
        ({"limit": "None"}, "kv.limit: .*write null"),
        ({"limit": "many"}, "kv.limit: expected int or null, got 'many'"),
        ({"label": "None"}, "kv.label: .*write null"),
        ({"sizes": "12"}, "kv.sizes: expected a list of int, got '12'"),
        ({"sizes": [1, "2"]}, r"kv.sizes\[1\]: expected int, got '2'"),
        ({"pair": [1]}, r"kv.pair: expected \[int, float\], got \[1\]"),
        ({"table": {"a": "b"}}, "kv.table.a: expected int"),
        ({"table": [1]}, "kv.table: expected a mapping"),
        ({"by_id": {"x": 1.0}}, "kv.by_id: expected a mapping {int: float} or null"),
        ({"inner": {"dept": 1}}, "kv.inner.dept: unknown option; it has: depth; did you mean 'depth'"),
        ({"inners": 3}, "kv.inners: expected a list of {depth: …}, got 3"),
        ({"any_of": 3}, "kv.any_of: expected str or a list of str or null, got 3"),
        (["count"], "kv: expected a mapping"),
    ],
)
def test_wrong_values_name_the_key(values: Any, message: str) -> None:
    """C46: no typo and no wrong type gets through, and the message says what would be right."""
    with pytest.raises(ConfigError, match=message):
        build(Options, values, "kv", owner="kv=mine")


def test_a_required_value_is_asked_for() -> None:
    @dataclass
    class Needy:
        path: str

    with pytest.raises(ConfigError, match=r"model.path: a value is required \(str\)"):
        build(Needy, {}, "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("block_size", 15),
        ("block_size", 2048),
        ("num_kv_blocks", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0.0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 10**30),
        ("max_num_batched_tokens", 2**24 + 1),
        ("max_model_len", 2**24 + 1),
        ("num_kv_blocks", 2**31),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("tensor_parallel_size", 2),
        ("seed", -1),
        ("device", "tpu"),
        ("dtype", "int7"),
        ("load_format", "gguf"),
    ],
)
def test_senseless_values_are_refused(key: str, value: Any) -> None:
    """C46: right in type, wrong in sense."""
    with pytest.raises(ConfigError, match=f"engine.{key}.*{value}"):
        EngineConfig.from_kwargs(**{key: value})


@pytest.mark.parametrize("value", [1, 4, 16, 1024])
def test_block_sizes(value: int) -> None:
    assert EngineConfig.from_kwargs(block_size=value).engine.block_size == value


def test_an_unknown_keyword_of_llm() -> None:
    with pytest.raises(ConfigError, match="unknown keyword 'max_num_seq'.*did you mean 'max_num_seqs'"):
        EngineConfig.from_kwargs(max_num_seq=4)


def test_names_are_looked_up_as_yaml_first(tmp_path: Path) -> None:
    """A preset names the plugin it configures; explicit options win over the preset's."""
    preset = tmp_path / "policy" / "mygpu.yaml"
    preset.parent.mkdir()
    preset.write_text("name: auto\nrows: [1, 2]\nfallback: sdpa\n")
    asked = []

    def paths(group: str, name: str) -> list[str]:
        asked.append((group, name))
        return [f"file://{tmp_path}"]

    config = EngineConfig.from_kwargs(more_paths=paths, model="./x", policy="mygpu", kv="theirs")
    assert config.policy == PluginChoice("auto", {"rows": [1, 2], "fallback": "sdpa"})
    assert config.kv == PluginChoice("theirs")
    config = EngineConfig.from_kwargs(
        more_paths=paths, model="./x", policy={"name": "mygpu", "fallback": "flash"}, kv={"name": "theirs", "bits": 4}
    )
    assert config.policy == PluginChoice("auto", {"rows": [1, 2], "fallback": "flash"})
    assert config.kv == PluginChoice("theirs", {"bits": 4})
    assert {name for _, name in asked} == {"auto", "decode_first", "llguidance", "mygpu", "theirs"}  # a path is no name


@pytest.mark.parametrize("wrong", [3, {"bits": 4}, {"name": 4}, ["int8"], ""])
def test_a_plugin_is_chosen_by_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="^kv"):
        EngineConfig.from_kwargs(kv=wrong)


@pytest.mark.parametrize("wrong", [3, None, ["int8"]])
def test_what_is_no_choice_of_a_plugin_is_told_that_a_name_would_be(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="^kv: expected a name, or {name: …} and options beside it, got "):
        EngineConfig.from_kwargs(kv=wrong)


def test_model_by_name_path_or_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    small = EngineConfig.from_kwargs(model="qwen3_0_6b").model
    assert small.path == "Qwen/Qwen3-0.6B" and small.config is not None and small.config["head_dim"] == 128
    assert EngineConfig.from_kwargs(model="Qwen/Qwen3-8B").model.path == "Qwen/Qwen3-8B"
    assert EngineConfig.from_kwargs(model="ckpt").model.path == "ckpt"
    assert EngineConfig.from_kwargs(model=tmp_path / "ckpt").model.path == str(tmp_path / "ckpt")
    with pytest.raises(ConfigError, match="'tinny' is neither a folder nor.*did you mean 'tiny'"):
        EngineConfig.from_kwargs(model="tinny")


def test_every_shipped_choice_is_well_formed() -> None:
    for group in PLUGIN_GROUPS:
        for name in group_names(group):
            EngineConfig.from_kwargs(**{group: name})
    for name in set(group_names("model")) - {"path"}:
        assert EngineConfig.from_kwargs(model=name).model.name == name


def test_yaml_defaults_are_the_dataclass_defaults() -> None:
    """What --help shows is what LLM() does; sampling lists every field, with defaults of its own."""
    assert build(EngineOptions, load_yaml("engine", "default"), "engine") == EngineOptions()
    assert list(load_yaml("engine", "default") or ()) == [f.name for f in fields(EngineOptions)]
    assert list(load_yaml("sampling", "default") or ()) == [f.name for f in fields(SamplingParams)]
    root = yaml.safe_load((config_folders(CONFIG_PATHS)[0] / "config.yaml").read_text())
    chosen = {key: name for entry in root["defaults"] if isinstance(entry, dict) for key, name in entry.items()}
    assert {group: chosen[group] for group in DEFAULTS} == DEFAULTS


def test_configuration_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; from nanoserve import EngineConfig; EngineConfig.from_kwargs(kv='int8');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_preset_measured_on_a_device_takes_the_place_of_the_policy_there():
    config = EngineConfig.from_kwargs(policy={"name": "auto", "by_device": {"RTX 3060": "rtx3060", "Moon": "nowhere"}})
    assert config.policy_on("cpu") == config.policy and "by_device" not in config.policy.options
    rtx3060 = config.policy_on("NVIDIA GeForce RTX 3060 Laptop GPU").options["table"]
    assert rtx3060[0]["use"] == ["triton_varlen", "sdpa"]
    with pytest.raises(ConfigError, match=r"policy.by_device.Moon: there is no policy/nowhere.yaml"):
        config.policy_on("Moon 1")


@pytest.mark.parametrize(
    "policy, device, origin",
    [
        ("auto", "cpu", "policy/auto.yaml"),
        ("auto", "NVIDIA H200", "policy/h200.yaml"),
        ("rtx3060", "NVIDIA H200", "policy/rtx3060.yaml"),
        ({"name": "auto", "by_device": {"H200": "rtx3060"}}, "NVIDIA H200", "policy/rtx3060.yaml"),
        ({"name": "auto", "table": [{"phase": "decode", "use": ["sdpa"]}]}, "NVIDIA H200", "options of its own"),
        ("somebody_s", "NVIDIA H200", "its defaults"),
        ({"name": "somebody_s", "patience": 3}, "cpu", "options of its own"),
    ],
)
def test_the_table_that_serves_is_named(policy, device, origin):
    config = EngineConfig.from_kwargs(policy=policy)
    assert config.policy_origin_on(device) == origin


def test_a_policy_file_that_refers_to_the_rest_of_the_configuration_is_not_read_for_its_name(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/mine.yaml").write_text("name: mine\nlimit: ${engine.max_num_seqs}\n")
    config = replace(EngineConfig.from_kwargs(), policy=PluginChoice("mine", {"limit": 256}))
    assert config.policy_origin_on("cpu", lambda group, name: [f"file://{tmp_path}"]) == "options of its own"


def test_a_preset_of_devices_may_have_presets_itself():
    config = EngineConfig.from_kwargs(policy={"name": "auto", "by_device": {"cpu": "auto"}})
    assert config.policy_on("cpu") == config.policy


def test_a_table_that_was_given_stays_where_there_is_a_preset():
    table = [{"phase": "decode", "use": ["paged_v1"]}]
    config = EngineConfig.from_kwargs(policy={"name": "auto", "table": table})
    assert config.policy_on("NVIDIA H200").options == {"table": table}


@pytest.mark.parametrize("option", [{"graph_capture": "start"}, {"graph_max_tokens": 100}])
def test_eager_mode_and_options_of_graphs_exclude_each_other(option):
    (key,) = option
    with pytest.raises(ConfigError, match=f"engine.{key} must be left out with enforce_eager=true"):
        EngineConfig.from_kwargs(enforce_eager=True, **option)
