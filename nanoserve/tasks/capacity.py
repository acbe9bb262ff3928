"""``task=capacity``: what fits a GPU before there is one: KV bytes per token, blocks, the largest batch by context.

The formula is ``2 · layers · kv_heads · head_dim · bytes`` per token, plus what a format keeps beside the data. Nothing
here knows it: a KV format is asked through its own ``bytes_per_block``, and weights are counted on the engine's own
model, built without memory on PyTorch's meta device. What is left of the GPU is divided as the engine divides it:

    pool = memory · gpu_memory_utilization − reserved − (weights + activations)

Only *activations* are an estimate, since the engine measures them in a forward pass: the larger of the widest point of
a layer over ``max_num_batched_tokens`` tokens and of the logits of ``max_num_seqs`` samples. With ``engine.device=cpu``
the pool is what the engine takes on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoserve.config import EngineConfig, EngineOptions
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import KVCacheShape
from nanoserve.engine.build import engine_dtype, resolve_max_model_len
from nanoserve.engine.guard import block_bytes
from nanoserve.engine.memory import blocks_on_cpu
from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import resolve_model
from nanoserve.models.parallel import ParallelContext
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.tasks.bench.record import print_table, write

if TYPE_CHECKING:
    from nanoserve.registry import Registry
    from nanoserve.tasks import Job

GIB = 2**30


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/capacity.yaml``.

    memory_gib: of the GPU. reserved_gib: what the CUDA context and other processes hold of it. formats: KV formats to
    compare; None is all of them. contexts: tokens per sequence; None is the longest sequence and parts of it.
    """

    memory_gib: float = 24.0
    reserved_gib: float = 0.5
    formats: list[str] | None = None
    contexts: list[int] | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.memory_gib < math.inf:
            raise ConfigError(f"memory_gib must be above 0 and finite, not {self.memory_gib}")
        if not 0 <= self.reserved_gib < math.inf:
            raise ConfigError(f"reserved_gib must be at least 0 and finite, not {self.reserved_gib}")
        if self.formats == []:
            raise ConfigError("formats must be null or a list of KV formats, not []")
        if self.contexts is not None and (not self.contexts or min(self.contexts) < 1):
            raise ConfigError(f"contexts must be a list of numbers of at least 1, not {self.contexts}")


@dataclass(frozen=True)
class Plan:
    """One KV format in one memory. num_blocks: those handed out; the engine allocates a scratch block besides."""

    kv: str
    block_size: int
    bytes_per_block: int
    num_blocks: int
    weight_bytes: int
    activation_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    @property
    def pool_bytes(self) -> int:
        """What the engine allocates for the cache."""
        return (self.num_blocks + 1) * self.bytes_per_block

    def batch(self, context: int) -> int:
        """Sequences of ``context`` tokens that the pool holds at once, prefixes not shared."""
        return self.num_blocks // -(-context // self.block_size)


def run(job: Job) -> dict[str, Any]:
    options: Options = job.options
    config, registry = job.config, job.registry
    output = job.file("output", options.output)
    longest = longest_sequence(config)
    contexts = options.contexts or [n for n in (longest // 16, longest // 4, longest) if n]
    if max(contexts) > longest:
        raise ConfigError(f"contexts: {max(contexts)} exceeds the longest sequence of {longest} tokens")
    names = options.formats or registry.names("kvcache")
    plans = [plan(config, registry, name, options.memory_gib, options.reserved_gib) for name in names]
    print_plans(plans, contexts, config, options)
    record = [{**asdict(p), "pool_bytes": p.pool_bytes, "batch": {str(n): p.batch(n) for n in contexts}} for p in plans]
    if output is not None:
        write(output, {"config": asdict(config), "plans": record})
    chosen = next((p for p in plans if p.kv == config.kv.name), plans[0])
    return {
        "kv": chosen.kv,
        "bytes per token": chosen.bytes_per_token,
        "blocks": chosen.num_blocks,
        "tokens": chosen.num_blocks * chosen.block_size,
        **{f"batch at {n}": chosen.batch(n) for n in contexts},
    }


def model_config(config: EngineConfig) -> tuple[Path | None, ModelConfig]:
    """The checkpoint's folder and the shape of the model that an engine of this configuration would load.

    A shape in the configuration is enough: then no checkpoint is looked for, and none is downloaded.
    """
    if config.model.config is not None:
        return None, ModelConfig.from_dict(config.model.config, source="model.config")
    assert config.model.path is not None  # ModelOptions has checked
    folder = resolve_model(config.model.path)
    return folder, ModelConfig.from_folder(folder)


def longest_sequence(config: EngineConfig) -> int:
    """Tokens."""
    return resolve_max_model_len(config.engine, model_config(config)[1])


def plan(config: EngineConfig, registry: Registry, kv: str, memory_gib: float, reserved_gib: float) -> Plan:
    """How an engine of this configuration with KV format ``kv`` would divide a GPU of ``memory_gib`` (or the CPU).

    Raises ConfigError when nothing is left for the cache.
    """
    options = config.engine
    folder, shape = model_config(config)
    device = torch.device("cpu" if options.device == "cpu" else "cuda")
    dtype = engine_dtype(options.dtype, shape, folder, device)
    max_model_len = resolve_max_model_len(options, shape)
    model = Qwen3ForCausalLM(shape, ParallelContext(), dtype, torch.device("meta"), max_model_len)
    weights = model.cos_sin.nbytes + sum(shard.target.nbytes for shard in model.shards().values())
    activations = activation_bytes(shape, options, dtype)
    spec = registry.get("kvcache", kv)
    kv_options = registry.make_options("kvcache", spec, config.kv.options if kv == config.kv.name else {})
    cache = spec.factory(
        kv_options,
        KVCacheShape(
            num_layers=shape.num_hidden_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=options.block_size,
            dtype=dtype,
            device=device,
        ),
    )
    per_block = block_bytes(cache)
    if options.num_kv_blocks is not None:
        num_blocks = options.num_kv_blocks
    elif device.type == "cpu":
        num_blocks = blocks_on_cpu(per_block, options.max_num_seqs, -(-max_model_len // options.block_size))
    else:
        budget = int((memory_gib * options.gpu_memory_utilization - reserved_gib) * GIB) - weights - activations
        num_blocks = budget // per_block - 1  # one is the scratch block
        if num_blocks < 1:
            raise ConfigError(
                f"memory_gib={memory_gib:g} leaves no room for the KV cache: of {options.gpu_memory_utilization:.0%}, "
                f"weights take {weights / GIB:.1f} GiB, activations about {activations / GIB:.1f}, "
                f"reserved are {reserved_gib:g}"
            )
    return Plan(kv, options.block_size, per_block, num_blocks, weights, activations)


def activation_bytes(shape: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Estimate of a forward's peak beside the weights."""
    attention = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    widest = 2 * shape.hidden_size + max(attention, 3 * shape.intermediate_size)
    layer = options.max_num_batched_tokens * widest * dtype.itemsize
    hidden = 2 * options.max_num_batched_tokens * shape.hidden_size * dtype.itemsize
    logits = 2 * options.max_num_seqs * shape.vocab_size * torch.float32.itemsize  # and their softmax
    return max(layer, hidden + logits)


def print_plans(plans: Sequence[Plan], contexts: Sequence[int], config: EngineConfig, options: Options) -> None:
    first = plans[0]
    if config.engine.device == "cpu":
        where = "the engine's pool on a CPU"
    else:
        where = (
            f"{options.memory_gib:g} GiB · {config.engine.gpu_memory_utilization:g} − {options.reserved_gib:g} reserved"
            f" − {first.weight_bytes / GIB:.2f} weights − {first.activation_bytes / GIB:.2f} activations (estimate)"
        )
    columns = ["kv", "bytes per token", "pool GiB", "blocks", "tokens", *(f"batch at {n:,}" for n in contexts)]
    rows = [
        [
            p.kv,
            f"{p.bytes_per_token:,.0f}",
            f"{p.pool_bytes / GIB:.2f}",
            f"{p.num_blocks:,}",
            f"{p.num_blocks * p.block_size:,}",
            *(f"{p.batch(n):,}" for n in contexts),
        ]
        for p in plans
    ]
    print_table(f"{config.model.name}: {where}", columns, rows)
