"""The loader finds checkpoints, refuses incomplete ones by tensor name, and never leaves a weight uninitialised."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM as HFQwen3

from nanoserve.contracts.errors import ConfigError, ModelLoadError
from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import load_model, resolve_dtype, resolve_model
from nanoserve.models.parallel import ParallelContext
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from tests.core.test_model_config import config
from tests.core.test_model_forward import max_diff, prompts

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(folder: Path, **options) -> Qwen3ForCausalLM:
    return load_model(ModelConfig.from_folder(folder), folder, **options)


@pytest.fixture
def checkpoint(tiny_models, tmp_path):
    """A private copy of a tiny checkpoint: ``edit(change_tensors, tied=…, **config)`` rewrites it."""

    def edit(change=lambda tensors: None, tied: bool = True, **changes) -> Path:
        source, _ = tiny_models(tie_word_embeddings=tied)
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
        tensors = load_file(source / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
        values = json.loads((source / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        return tmp_path

    return edit


@pytest.fixture
def sharded(tiny_models, tmp_path):
    """A private copy of a tiny checkpoint in 13 shards."""
    shutil.copytree(tiny_models(max_shard_size="40KB")[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


# ── tied and untied (C36) ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("copies", ["none", "equal", "different"])
def test_tied_checkpoints_equal_hugging_face(checkpoint, copies, caplog):
    """C36 a, b: a stored lm_head that differs is used, as transformers does, and the log says so."""

    def change(tensors):
        if copies != "none":
            tensors[LM_HEAD] = tensors[EMBEDDING].clone()
        if copies == "different":
            tensors[LM_HEAD] *= 2

    folder = checkpoint(change)
    model = load(folder)
    assert (model.lm_head is model.embed_tokens) == (copies != "different")
    assert max_diff(model, HFQwen3.from_pretrained(folder), prompts(50)) < 1e-4
    assert ("stored one" in caplog.text) == (copies == "different")


@pytest.mark.parametrize("tie", [False, None], ids=["false", "absent"])
def test_untied_checkpoint_without_lm_head_is_refused(checkpoint, tie):
    """C36 c, d."""
    folder = checkpoint(lambda tensors: tensors.pop(LM_HEAD), tied=False, tie_word_embeddings=tie)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)


# ── every tensor, in its right shape (C36 e) ──────────────────────────────────────────────────────────────────────────


def test_any_missing_tensor_is_named(tiny_models, checkpoint):
    names = list(load_file(tiny_models(tie_word_embeddings=False)[0] / SINGLE))
    assert len(names) == 25
    for name in names:
        folder = checkpoint(lambda tensors, name=name: tensors.pop(name), tied=False)
        with pytest.raises(ModelLoadError, match=re.escape(repr(name))):
            load(folder)


def test_unknown_tensor_is_named_but_stored_rotary_frequencies_are_not_minded(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(checkpoint(lambda tensors: tensors.update({name: torch.ones(16)})))
    name = "model.layers.2.mlp.up_proj.weight"
    folder = checkpoint(lambda tensors: tensors.update({name: torch.ones(128, 64)}))
    with pytest.raises(ModelLoadError, match=re.escape(repr(name))):
        load(folder)


def test_bias_that_the_config_denies_is_refused(tiny_models, tmp_path):
    shutil.copytree(tiny_models(attention_bias=True)[0], tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text()) | {"attention_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"self_attn\.\w_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", EMBEDDING])
def test_wrong_shape_is_named(checkpoint, name):
    folder = checkpoint(lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(repr(name))}.*has shape \["):
        load(folder)


def test_absent_head_dim_means_128_and_these_weights_do_not_fit(checkpoint):
    """C40: not hidden_size / heads = 16, which no weight here has either."""
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn.*has shape .*config\.json implies"):
        load(checkpoint(head_dim=None))


def test_quantised_storage_is_refused(checkpoint):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = checkpoint(lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"{re.escape(name)}.*I8"):
        load(folder)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_index_is_the_authority(sharded, tiny_models):
    """A stale single file and a stray shard beside the index are not read."""
    shutil.copy(tiny_models(seed=1)[0] / SINGLE, sharded / SINGLE)
    save_file({"stray": torch.ones(1)}, sharded / "model-99999.safetensors")
    assert max_diff(load(sharded), tiny_models()[1], prompts(50)) < 1e-4


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_faulty_index(sharded):
    original = (sharded / INDEX).read_text()
    weight_map = json.loads(original)["weight_map"]
    shard = weight_map["model.norm.weight"]
    other = next(name for name in weight_map.values() if name != shard)
    for change, message in [
        (lambda m: m.pop("model.norm.weight"), r"lacks tensor 'model\.norm\.weight'"),
        (lambda m: m.update({"model.norm.weight": other}), rf"'model\.norm\.weight' is not in {other}"),
        (lambda m: m.update({"model.norm.weight": "gone.safetensors"}), r"lacks 'gone\.safetensors'"),
        (lambda m: m.update({"model.norm.weight": "../" + shard}), "not a file of the checkpoint folder"),
        (lambda m: m.update({"model.norm.weight": 3}), "not a valid index"),
    ]:
        (sharded / INDEX).write_text(original)
        edit_index(sharded, change)
        with pytest.raises(ModelLoadError, match=message):
            load(sharded)


def test_truncated_missing_and_foreign_files(checkpoint):
    folder = checkpoint()
    content = (folder / SINGLE).read_bytes()
    for broken in (content[:-10], content[:100], b"version https://git-lfs.github.com/spec/v1\n", b""):
        (folder / SINGLE).write_bytes(broken)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable safetensors file"):
            load(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"holds neither model\.safetensors nor"):
        load(folder)


def large_config() -> ModelConfig:
    return config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, head_dim=64,
                  num_key_value_heads=8, tie_word_embeddings=True)  # fmt: skip


def print_loading_peak(folder: str) -> None:
    """Bytes that loading adds to the resident memory of this process at most, 0 where that cannot be told."""

    def resident(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    shape = large_config()
    load_model(shape, None, load_format="dummy")  # what is imported on the way
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or freed memory would be used again without showing
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    except OSError:
        print(0)
        return
    before = resident("VmRSS")
    model = load_model(shape, Path(folder), dtype=torch.float32)
    assert model.norm.eq(1).all()
    print(resident("VmHWM") - before)


def test_peak_host_memory(tmp_path):
    """Beyond the weights, loading needs at most 1.2 × the largest shard (4 shards of 34 MB each). In a process of its
    own, for what other tests left behind shows."""
    tensors = {
        name: shard.target.clone()
        for name, shard in load_model(large_config(), None, load_format="dummy").shards().items()
    }
    weight_map = {}
    for i in range(4):
        file_name = f"model-{i}.safetensors"
        mine = [n for n in tensors if int((re.findall(r"layers\.(\d)", n) or ["0"])[0]) // 2 == i]
        save_file({n: tensors[n] for n in mine}, tmp_path / file_name)
        weight_map |= dict.fromkeys(mine, file_name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    weights = sum(t.nbytes for t in tensors.values())
    largest = max(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert largest < weights / 3
    measure = "import sys; from tests.core.test_model_loader import print_loading_peak as p; p(sys.argv[1])"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", measure, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    peak = int(result.stdout)
    if not peak:
        pytest.skip("this system does not let a process reset its peak memory")
    assert weights < peak < weights + 1.2 * largest


# ── dtype and dummy weights ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stored", "named", "asked", "expected"),
    [
        (torch.bfloat16, "bfloat16", "auto", torch.bfloat16),
        (torch.bfloat16, None, "auto", torch.bfloat16),
        (torch.bfloat16, "float16", "auto", torch.float16),
        (torch.float16, "float16", "float32", torch.float32),
        (torch.float32, "float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype(checkpoint, stored, named, asked, expected):
    """C38, C41: an explicit dtype wins, then what config.json names, then what the file holds."""

    def change(tensors):
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})

    model = load(checkpoint(change, dtype=named), dtype=asked)
    assert {shard.target.dtype for shard in model.shards().values()} == {expected}


def test_unknown_dtype_and_load_format_are_refused(tiny_models):
    folder, _ = tiny_models()
    with pytest.raises(ModelLoadError, match="int8.*float16"):
        resolve_dtype("int8", config(), None)
    with pytest.raises(ConfigError, match="load_format"):
        load(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="folder"):
        load_model(config(), None)


def test_dummy_weights():
    """Every weight is filled, the same for the same seed, and the model runs."""
    shape = config(tie_word_embeddings=False)
    first, again, other = (load_model(shape, None, load_format="dummy", seed=s) for s in (0, 0, 1))
    for name, shard in first.shards().items():
        target = shard.target
        assert torch.equal(target, again.shards()[name].target)
        if name.endswith("norm.weight"):
            assert target.eq(1).all()
        else:
            assert target.std().item() == pytest.approx(0.02, rel=0.1)
            assert not torch.equal(target, other.shards()[name].target)


# ── tensor-parallel shards (C40) ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_loads_its_slices(tiny_models, kv_heads, rank):
    """Columns of q, k, v, gate, up and rows of o, down are split; one KV head for two ranks is kept by both."""
    folder, _ = tiny_models(num_key_value_heads=kv_heads)
    full = load_file(folder / SINGLE)
    model = load(folder, parallel=ParallelContext(rank, 2))
    assert (model.num_q_heads, model.num_kv_heads) == (2, max(1, kv_heads // 2))
    layer = model.layers[1]

    def part(name: str, dim: int = 0, pieces: int = 2) -> torch.Tensor:
        return full[f"model.layers.1.{name}_proj.weight"].chunk(pieces, dim)[rank % pieces]

    kv = [part(f"self_attn.{x}", pieces=min(2, kv_heads)) for x in "kv"]
    assert torch.equal(layer.qkv.weight, torch.cat([part("self_attn.q"), *kv]))
    assert torch.equal(layer.o.weight, part("self_attn.o", dim=1))
    assert torch.equal(layer.gate_up.weight, torch.cat([part("mlp.gate"), part("mlp.up")]))
    assert torch.equal(layer.down.weight, part("mlp.down", dim=1))
    assert torch.equal(model.embed_tokens, full[EMBEDDING])


def test_uneven_splits_are_refused():
    """C40: 4 heads over 3 ranks; 4 ranks over 2 KV heads keep one each."""
    meta = torch.device("meta")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3.*num_attention_heads = 4"):
        Qwen3ForCausalLM(config(), ParallelContext(0, 3), torch.float32, meta)
    ranks = [Qwen3ForCausalLM(config(), ParallelContext(rank, 4), torch.float32, meta) for rank in range(4)]
    regions = [m.shards()["model.layers.0.self_attn.k_proj.weight"].region[0] for m in ranks]
    assert regions == [slice(0, 32), slice(0, 32), slice(32, 64), slice(32, 64)]


# ── finding the folder ────────────────────────────────────────────────────────────────────────────────────────────────


def test_folders_resolve_against_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "epoch=9,best").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("epoch=9,best") == resolve_model("./epoch=9,best") == tmp_path / "epoch=9,best"
    tiny = resolve_model("pkg://nanoserve.assets.tiny")
    assert (tiny / "train.py").is_file()
    assert resolve_model("pkg://nanoserve/assets/tiny") == tiny


@pytest.mark.parametrize("name", ["./gone", "/gone/too", "a/b/c", "pkg://nanoserve.nowhere", "pkg://nanoserve/nowhere"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(tmp_path / "model.gguf")


def test_hub_cache_and_offline_mode(tmp_path):
    """An id in the hub's cache resolves without a network; one that is not there fails in one line that names it."""
    repo = tmp_path / "hub" / "models--acme--tiny"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    code = (
        "from nanoserve.models.loader import resolve_model\n"
        "print(resolve_model('acme/tiny'))\n"
        "try: resolve_model('acme/other')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found, refused = run.stdout.splitlines()
    assert found == str(snapshot)
    assert refused.startswith("ModelLoadError model 'acme/other' is neither a folder")
