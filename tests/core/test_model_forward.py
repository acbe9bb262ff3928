"""Logits of the packed forward pass equal Hugging Face's in fp32, for every layout a Qwen3 checkpoint may have."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import Qwen3ForCausalLM as HFQwen3

from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import load_model
from tests.core.test_model_config import YARN
from tests.helpers.dense_step import packed_logits
from tests.helpers.tiny_model import build_tiny_model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


def hf_logits(model: HFQwen3, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


def max_diff(model, oracle: HFQwen3, batch: list[list[int]]) -> float:
    pairs = zip(packed_logits(model, batch), batch, strict=True)
    return max((ours - hf_logits(oracle, prompt)).abs().max().item() for ours, prompt in pairs)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"head_dim": 128},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"max_shard_size": "40KB"},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_logits_equal_hugging_face(tiny_models, overrides):
    """C40 and C03c (200 tokens): every head layout, tied and not, single file and shards."""
    folder, oracle = tiny_models(**overrides)
    assert len(list(folder.glob("*.safetensors"))) == (13 if "max_shard_size" in overrides else 1)
    model = load_model(ModelConfig.from_folder(folder), folder)
    assert max_diff(model, oracle, prompts(100, 1, 200)) < 1e-4


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "float32"},
        {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "float32"},
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": YARN | {"attention_factor": 1.0}},
        {"rope_parameters": YARN | {"rope_theta": 1e6, "factor": 8.0}},
    ],
    ids=str,
)
def test_config_generations_and_yarn(tiny_models, tmp_path, keys):
    """C38 and C39: the same weights under v4 and v5 keys, with and without YaRN; Hugging Face reads the same file."""
    folder, _ = tiny_models()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    del values["rope_parameters"], values["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values | keys))
    oracle = HFQwen3.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(ModelConfig.from_folder(tmp_path), tmp_path)
    assert max_diff(model, oracle, prompts(200)) < 1e-4


def test_a_wrong_rope_base_would_be_noticed(tiny_models):
    """C38: the fixture is sensitive, so the equalities above mean something."""
    folder, oracle = tiny_models()
    values = json.loads((folder / "config.json").read_text())
    wrong = ModelConfig.from_dict(values | {"rope_parameters": {"rope_theta": 1e4}})
    assert max_diff(load_model(wrong, folder), oracle, prompts(100)) > 1


def test_positions_beyond_the_position_table(tiny_models):
    """C03b: a table extended past max_position_embeddings gives what Hugging Face gives there."""
    folder, oracle = tiny_models(max_position_embeddings=64)
    model = load_model(ModelConfig.from_folder(folder), folder, max_positions=128)
    assert max_diff(model, oracle, prompts(128)) < 1e-4


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A bf16 checkpoint whose hidden states pass fp16's 65504, and its fp32 oracle."""
    folder = tmp_path_factory.mktemp("overflowing")
    build_tiny_model(folder, dtype=torch.bfloat16)
    oracle = HFQwen3.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    oracle.model.layers[0].mlp.down_proj.weight *= 1e4
    oracle.save_pretrained(folder)
    oracle = oracle.float()
    hidden = oracle(torch.tensor(prompts(50)), output_hidden_states=True).hidden_states
    assert max(h.abs().max() for h in hidden) > 1e5
    return folder, oracle


@pytest.mark.parametrize(
    ("dtype", "computed", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.bfloat16, 0.3),
        (torch.float16, torch.float16, 0.05),
        ("auto", torch.bfloat16, 0.3),
    ],
    ids=str,
)
def test_every_dtype_survives_large_hidden_states(overflowing, dtype, computed, tolerance):
    """C41: auto is the checkpoint's dtype; fp16 keeps its residual stream in fp32 and stays right."""
    folder, oracle = overflowing
    model = load_model(ModelConfig.from_folder(folder), folder, dtype=dtype)
    assert model.dtype == computed
    (ours,) = packed_logits(model, prompts(50))
    assert ours.dtype == torch.float32
    assert (ours - hf_logits(oracle, prompts(50)[0])).abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3), (torch.float16, 0.05)], ids=str
)
def test_dtypes_on_the_gpu(overflowing, dtype, tolerance):
    folder, oracle = overflowing
    model = load_model(ModelConfig.from_folder(folder), folder, dtype=dtype, device="cuda")
    (ours,) = packed_logits(model, prompts(50))
    assert (ours.cpu() - hf_logits(oracle, prompts(50)[0])).abs().max() < tolerance


def test_a_nan_stays_in_its_own_sequence(tiny_models):
    """C41: one poisoned embedding row leaves the neighbours in the batch bit for bit as they were."""
    folder, _ = tiny_models()
    model = load_model(ModelConfig.from_folder(folder), folder)
    batch = [[1, 2, 3], [4, 511, 5], [6, 7, 8, 9]]
    before = packed_logits(model, batch)
    model.embed_tokens = model.embed_tokens.clone()  # tied: lm_head keeps its finite row
    model.embed_tokens[511] = float("nan")
    after = packed_logits(model, batch)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert after[1][1:].isnan().all()
