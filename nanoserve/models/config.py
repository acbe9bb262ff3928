"""A Qwen3 ``config.json`` as a checked, frozen dataclass. Imports neither torch nor transformers.

Both generations of keys are read: v4 (``rope_theta`` and ``rope_scaling`` at top level, ``torch_dtype``) and v5
(``rope_parameters``, ``dtype``). Whatever would silently change the model's output is refused by name.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoserve.contracts.errors import ModelLoadError

logger = logging.getLogger(__name__)

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_HEAD_DIM = 128
ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Everything below ``theta`` matters for YaRN only.

    factor: context extension. attention_factor: multiplies cos and sin. beta_fast, beta_slow: full turns over the
    original context above / below which a frequency is kept / divided by ``factor``; truncate: round these bounds.
    """

    theta: float
    type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense Qwen3; field names are those of ``config.json``.

    dtype: what the checkpoint says it is stored in ("bfloat16", …), None when it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    dtype: str | None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``folder/config.json``. Raises ModelLoadError."""
        path = Path(folder) / "config.json"
        return cls.from_dict(_read_json(path), source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the model config") -> ModelConfig:
        """values: keys of ``config.json``. Raises ModelLoadError naming ``source`` and the key at fault."""
        read = _Reader(values, source)
        read.refuse_unsupported()
        num_attention_heads = read.integer("num_attention_heads")
        num_key_value_heads = read.integer("num_key_value_heads", default=num_attention_heads)
        if num_attention_heads % num_key_value_heads:
            raise read.error(
                "num_key_value_heads",
                f"{num_attention_heads} attention heads cannot share {num_key_value_heads} key/value heads evenly",
            )
        head_dim = read.integer("head_dim", default=DEFAULT_HEAD_DIM)
        if head_dim % 2:
            raise read.error("head_dim", f"rotary embedding needs an even number, not {head_dim}")
        max_position_embeddings = read.integer("max_position_embeddings")
        return cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=read.boolean("tie_word_embeddings"),
            attention_bias=read.boolean("attention_bias"),
            rope=read.rope(max_position_embeddings),
            dtype=read.dtype(),
        )


def eos_token_ids(folder: str | Path) -> frozenset[int]:
    """Ids that end generation: those of ``generation_config.json``, or of ``config.json`` when that file is absent.

    The rule of Hugging Face's ``generate``: a generation config without an EOS means none, and the tokenizer's EOS
    plays no part. Ids outside the vocabulary are dropped with a warning. Raises ModelLoadError.
    """
    config_path = Path(folder) / "config.json"
    generation_path = Path(folder) / "generation_config.json"
    config = _read_json(config_path)
    path, ids = config_path, config.get("eos_token_id")
    if generation_path.is_file():
        path, ids = generation_path, _read_json(generation_path).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise ModelLoadError(f"{path}: eos_token_id must be an integer or a list of integers, not {ids}")
    vocab_size = _Reader(config, str(config_path)).integer("vocab_size")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        logger.warning("%s: eos_token_id %s ignored: outside the vocabulary of %d", path, outside, vocab_size)
    return frozenset(ids) - frozenset(outside)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}; a checkpoint folder must hold one") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return values


class _Reader:
    """Typed access to the keys of one mapping; a null is an absent key. ``prefix`` locates a nested mapping."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.source = source
        self.prefix = prefix

    def error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {self.prefix}{key}: {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "missing" if value is None else f"must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def refuse_unsupported(self) -> None:
        model_type = self.values.get("model_type")
        if model_type != "qwen3":
            raise self.error("model_type", f"{model_type!r} is not supported; nanoserve serves 'qwen3' (dense)")
        architectures = self.values.get("architectures", ["Qwen3ForCausalLM"])
        if "Qwen3ForCausalLM" not in architectures:
            raise self.error("architectures", f"{architectures} is not supported; it must name Qwen3ForCausalLM")
        if self.values.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", f"{self.values['hidden_act']!r} is not supported; Qwen3 uses 'silu'")
        windowed = "sliding_attention" in self.values.get("layer_types", [])
        if self.boolean("use_sliding_window"):
            raise self.error("use_sliding_window", "sliding-window attention is not supported")
        if windowed and "sliding_window" in self.values:
            raise self.error("layer_types", "sliding-window attention is not supported")
        if "quantization_config" in self.values:
            raise self.error("quantization_config", "quantised weights are not supported")

    def dtype(self) -> str | None:
        name = str(self.values.get("dtype", self.values.get("torch_dtype", ""))).removeprefix("torch.")
        if name not in ("", "auto", "float32", "float16", "bfloat16"):
            raise self.error("dtype", f"{name!r} is not supported; use float32, float16 or bfloat16")
        return name if name not in ("", "auto") else None

    def rope(self, max_position_embeddings: int) -> RopeConfig:
        key = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        nested = self.values.get(key, {})
        if not isinstance(nested, Mapping):
            raise self.error(key, f"must be an object, not {nested!r}")
        read = _Reader(nested, self.source, f"{key}.")
        if unknown := sorted(set(read.values) - ROPE_KEYS):
            logger.warning("%s: %s: unknown key(s) ignored: %s", self.source, key, ", ".join(unknown))
        if read.number("partial_rotary_factor", 1.0) != 1.0 or self.number("partial_rotary_factor", 1.0) != 1.0:
            raise self.error("partial_rotary_factor", "only a full rotation (1.0) is supported")

        if "rope_theta" in read.values:
            theta = read.number("rope_theta")
        else:
            theta = self.number("rope_theta", DEFAULT_ROPE_THETA)
            if "rope_theta" not in self.values:
                logger.warning("%s: rope_theta missing, using the default %g", self.source, theta)
        if "rope_theta" in self.values and self.number("rope_theta") != theta:
            logger.warning("%s: %s.rope_theta = %g overrides the top-level rope_theta", self.source, key, theta)

        rope_type = read.values.get("rope_type", read.values.get("type", "default"))
        if rope_type == "default":
            return RopeConfig(theta)
        if rope_type != "yarn":
            raise read.error("rope_type", f"{rope_type!r} is not supported; use 'default' or 'yarn'")
        return read.yarn(theta, max_position_embeddings)

    def yarn(self, theta: float, max_position_embeddings: int) -> RopeConfig:
        original = self.integer("original_max_position_embeddings", default=max_position_embeddings)
        implied = max_position_embeddings / original
        if "factor" not in self.values and implied == 1:
            raise self.error("factor", "missing; YaRN needs it, or original_max_position_embeddings to derive it from")
        factor = self.number("factor", default=implied)
        if factor < 1:
            raise self.error("factor", f"must be at least 1, not {factor:g}")
        if implied not in (factor, 1):
            logger.warning(
                "%s: %sfactor = %g is used, though max_position_embeddings / original_max_position_embeddings = %g",
                self.source, self.prefix, factor, implied,
            )  # fmt: skip

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1.0

        attention_factor = magnitude(1.0)
        if "mscale" in self.values and "mscale_all_dim" in self.values:
            attention_factor = magnitude(self.number("mscale")) / magnitude(self.number("mscale_all_dim"))
        return RopeConfig(
            theta=theta,
            type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=self.number("attention_factor", default=attention_factor),
            beta_fast=self.number("beta_fast", default=32.0),
            beta_slow=self.number("beta_slow", default=1.0),
            truncate=self.boolean("truncate", default=True),
        )
