"""From a name to a model with weights: find the folder, read the safetensors, leave no byte of a weight to chance."""

from __future__ import annotations

import importlib.resources
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanoserve.contracts.errors import ConfigError, ModelLoadError
from nanoserve.models.config import ModelConfig
from nanoserve.models.layers import WeightShard, whole
from nanoserve.models.parallel import ParallelContext
from nanoserve.models.qwen3 import Qwen3ForCausalLM

logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "pkg://"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt"]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
DUMMY_STD = 0.02
PROGRESS_FROM_BYTES = 256 * 2**20


def resolve_model(path_or_id: str | Path) -> Path:
    """The folder of a checkpoint.

    path_or_id: a folder (relative to the working directory), ``pkg://package/folder`` for one inside an installed
    package, or a Hugging Face hub id, which is downloaded or found in the hub's cache (HF_HOME, HF_HUB_OFFLINE and
    HF_TOKEN are honoured). Raises ModelLoadError.
    """
    name = str(path_or_id)
    if name.startswith(PACKAGE_PREFIX):
        package, *below = name.removeprefix(PACKAGE_PREFIX).split("/")
        try:
            folder = Path(str(importlib.resources.files(package).joinpath(*below)))
        except (ModuleNotFoundError, ValueError) as error:
            raise ModelLoadError(f"model {name!r}: no such package is installed: {package}") from error
        if not folder.is_dir():
            raise ModelLoadError(f"model {name!r}: the package has no such folder")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ModelLoadError(f"model {name!r} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"model {name!r}: no such folder (looked for {folder.absolute()})")

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:  # the hub's own errors and those of its HTTP client derive from these
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelLoadError(
            f"model {name!r} is neither a folder (looked for {folder.absolute()}) nor could it be had from the "
            f"Hugging Face hub or its cache: {reason}"
        ) from error


def load_model(
    config: ModelConfig,
    folder: str | Path | None,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: Literal["auto", "dummy"] = "auto",
    parallel: ParallelContext | None = None,
    max_positions: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Qwen3ForCausalLM:
    """Build the model on ``device`` and fill it, from ``folder`` or with random weights (``load_format="dummy"``).

    folder: the checkpoint; may be None for dummy weights. dtype: see :func:`resolve_dtype`. max_positions: rows of the
    rotary table. seed: of the dummy weights. progress: draw a bar, on a terminal and for large checkpoints only.
    Tensors are copied one by one into the parameters, so host memory beyond the weights stays below one shard.
    Raises ModelLoadError naming the tensor for anything missing, unknown or of a wrong shape.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be 'auto' or 'dummy', not {load_format!r}")
    if folder is None and load_format != "dummy":
        raise ConfigError("no checkpoint folder given; only load_format=dummy works without one")
    torch_dtype = resolve_dtype(dtype, config, folder if load_format == "auto" else None)
    model = Qwen3ForCausalLM(config, parallel or ParallelContext(), torch_dtype, torch.device(device), max_positions)
    if load_format == "dummy" or folder is None:
        _fill_with_noise(model, seed)
    else:
        _fill_from(Path(folder), model, progress)
    return model


def resolve_dtype(dtype: torch.dtype | str, config: ModelConfig, folder: str | Path | None) -> torch.dtype:
    """The compute dtype: ``dtype`` itself, or for "auto" what ``config`` names, or what the weights in ``folder`` have.

    Raises ModelLoadError for anything but float32, float16 and bfloat16.
    """
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.dtype or "auto"
    if name == "auto" and folder is None:
        return torch.float32
    if name == "auto" and folder is not None:
        shards = _shard_files(Path(folder))
        name = next(iter(shards))
        with _open(Path(folder) / name) as file:
            tensor_name = EMBEDDING if EMBEDDING in file.keys() else next(iter(file.keys()))  # noqa: SIM118
            name = str(file.get_tensor(tensor_name).dtype).removeprefix("torch.")
    if name not in names:
        raise ModelLoadError(f"dtype {name!r} is not supported; use auto, {', '.join(names)}")
    return names[name]


def _fill_with_noise(model: Qwen3ForCausalLM, seed: int) -> None:
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, shard in model.shards().items():
        if name.endswith("norm.weight"):
            shard.target.fill_(1.0)
        else:
            shard.target.normal_(std=DUMMY_STD, generator=generator)


def _fill_from(folder: Path, model: Qwen3ForCausalLM, progress: bool) -> None:
    files = _shard_files(folder)
    wanted = model.shards()
    stored = {name for names in files.values() for name in names}
    if model.config.tie_word_embeddings and LM_HEAD in stored:
        model.lm_head = torch.empty_like(model.embed_tokens)
        wanted[LM_HEAD] = whole(model.lm_head)
    _check_names(folder, model.config, wanted, stored)

    total = sum((folder / name).stat().st_size for name in files)
    visible = progress and total >= PROGRESS_FROM_BYTES and sys.stderr.isatty()
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not visible) as bar:
        for file_name, names in files.items():
            with _open(folder / file_name) as file:
                for name in names:
                    _copy(file, file_name, name, wanted[name])
            bar.update((folder / file_name).stat().st_size)
    _settle_tie(model)


def _copy(file: Any, file_name: str, name: str, shard: WeightShard) -> None:
    try:
        source = file.get_slice(name)
    except SafetensorError as error:
        raise ModelLoadError(f"tensor {name!r} is not in {file_name}, where the checkpoint says it is") from error
    if tuple(source.get_shape()) != shard.full_shape:
        raise ModelLoadError(
            f"tensor {name!r} in {file_name} has shape {source.get_shape()}, "
            f"config.json implies {list(shard.full_shape)}"
        )
    if source.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ModelLoadError(f"tensor {name!r} in {file_name} is stored in unsupported format {source.get_dtype()}")
    shard.load(source)


def _check_names(folder: Path, config: ModelConfig, wanted: dict[str, WeightShard], stored: set[str]) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = ""
        if missing[0] == LM_HEAD:
            hint = "; config.json does not tie it to the embedding (tie_word_embeddings)"
        raise ModelLoadError(f"{folder} lacks tensor {_first(missing)}{hint}")
    unknown = sorted(stored - wanted.keys())
    if unknown:
        raise ModelLoadError(f"{folder} holds tensor {_first(unknown)} that this Qwen3 configuration has no place for")


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _settle_tie(model: Qwen3ForCausalLM) -> None:
    """A tied checkpoint may store lm_head all the same. As `transformers` does: equal is tied, different is untied."""
    if not model.config.tie_word_embeddings or model.lm_head is model.embed_tokens:
        return
    if torch.equal(model.lm_head, model.embed_tokens):
        model.lm_head = model.embed_tokens
    else:
        logger.warning(
            "tie_word_embeddings is true, but the checkpoint stores a different %s: using the stored one", LM_HEAD
        )


def _shard_files(folder: Path) -> dict[str, list[str]]:
    """File name → names of the tensors to read from it. With an index, nothing that it does not name is read."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelLoadError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        with _open(folder / SINGLE_NAME) as file:
            return {SINGLE_NAME: _without_buffers(file.keys())}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name in _without_buffers(weight_map):
            by_file.setdefault(weight_map[name], []).append(name)
        outside = [file_name for file_name in by_file if Path(file_name).name != file_name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{index} is not a valid index of shards: {error!r}") from error
    if outside:
        raise ModelLoadError(f"{index} names {outside[0]!r}, which is not a file of the checkpoint folder")
    if absent := [file_name for file_name in by_file if not (folder / file_name).is_file()]:
        raise ModelLoadError(f"{folder} lacks {_first(absent)}, which its index names")
    return by_file


def _without_buffers(names: Any) -> list[str]:
    """Old checkpoints store the rotary frequencies, which are computed here."""
    return [name for name in names if not name.endswith("rotary_emb.inv_freq")]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file (download incomplete?): {error}") from error
    with file as handle:
        yield handle
