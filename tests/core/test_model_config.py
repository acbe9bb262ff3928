"""config.json and generation_config.json: every key that changes the output is honoured or refused by name."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib import resources

import pytest
import torch
import yaml
from transformers import Qwen3ForCausalLM as HFQwen3

from nanoserve.contracts.errors import ModelLoadError
from nanoserve.models.config import ModelConfig, eos_token_ids
from nanoserve.models.parallel import ParallelContext
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from tests.helpers.tiny_model import build_tiny_model

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict({"rope_theta": 1e6} | SHAPE | changes)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1000000},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(keys, caplog):
    """C38."""
    assert ModelConfig.from_dict(SHAPE | keys).rope.theta == 1e6
    assert not caplog.records


def test_missing_or_contradicting_rope_theta_is_not_silent(caplog):
    """C38: neither key gives Hugging Face's default and says so; of two values the nested one wins, as there."""
    assert ModelConfig.from_dict(SHAPE).rope.theta == 10_000
    assert "rope_theta missing" in caplog.text
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    assert "overrides" in caplog.text


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({}, None),
    ],
)
def test_both_dtype_keys(keys, dtype):
    """C38."""
    assert config(**keys).dtype == dtype


@pytest.mark.parametrize(
    ("scaling", "attention_factor", "warns"),
    [
        (YARN, 1.138629, False),
        (YARN | {"attention_factor": 1.0}, 1.0, False),
        (YARN | {"factor": 8.0}, 1.207944, True),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 1.138629, False),
        ({"type": "yarn", "original_max_position_embeddings": 64}, 1.138629, False),
        ({"type": "yarn", "factor": 4.0}, 1.138629, False),
        (YARN | {"mystery": 1}, 1.138629, True),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_attention_factor(key, scaling, attention_factor, warns, caplog):
    """C39."""
    rope = config(**{key: scaling}).rope
    assert (rope.type, rope.theta) == ("yarn", 1e6)
    assert rope.attention_factor == pytest.approx(attention_factor, abs=1e-6)
    assert bool(caplog.records) == warns


def test_head_dim_defaults_to_128_not_to_hidden_over_heads():
    """C40."""
    assert ModelConfig.from_dict({k: v for k, v in SHAPE.items() if k != "head_dim"}).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),  # C40
        ({"rope_scaling": {"rope_type": "foo"}}, "rope_scaling.rope_type"),  # C39
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"head_dim": 33}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 512.0}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_refused_by_name(changes, key):
    with pytest.raises(ModelLoadError, match=rf"the model config: {key}: "):
        config(**changes)


def test_broken_files(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "generation", [None, {}, {"eos_token_id": None}, {"eos_token_id": 3}, {"eos_token_id": [3, 5]}]
)
def test_eos_ids_follow_hugging_face(tmp_path, generation):
    """C33: the generation config decides when there is one, config.json otherwise; the rule is generate's own."""
    build_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    values = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    theirs = HFQwen3.from_pretrained(tmp_path).generation_config.eos_token_id
    theirs = [] if theirs is None else theirs if isinstance(theirs, list) else [theirs]
    assert eos_token_ids(tmp_path) == set(theirs)


def test_eos_ids_outside_the_vocabulary_are_dropped_with_a_warning(tmp_path, caplog):
    """C33."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 5, 512]}')
    assert eos_token_ids(tmp_path) == {5}
    assert "[-1, 512]" in caplog.text
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["5"]}')
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0_6b", 0.596), ("1_7b", 1.721), ("4b", 4.022), ("8b", 8.191), ("14b", 14.768), ("32b", 32.762)],
)
def test_shipped_shapes_have_the_published_number_of_parameters(name, billions, caplog):
    """The dummy configurations are Qwen3's: parameters are counted from every shape the model asks a checkpoint for."""
    model = yaml.safe_load((resources.files("nanoserve.conf") / "model" / f"qwen3_{name}.yaml").read_text())
    with caplog.at_level(logging.WARNING):
        shape = ModelConfig.from_dict(model["config"])
    assert not caplog.records
    shards = Qwen3ForCausalLM(shape, ParallelContext(), torch.bfloat16, torch.device("meta")).shards()
    parameters = sum(torch.Size(shard.full_shape).numel() for shard in shards.values())
    assert parameters / 1e9 == pytest.approx(billions, abs=5e-4)


def test_reading_a_config_imports_neither_torch_nor_transformers():
    code = "import nanoserve.models.config, sys; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
