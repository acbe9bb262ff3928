"""From a configuration to a running engine: resolve every name once, check every combination, then allocate."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoserve.config import EngineConfig, EngineOptions
from nanoserve.contracts.attention import AttentionContext
from nanoserve.contracts.capabilities import Requirements
from nanoserve.contracts.errors import ConfigError, PluginError
from nanoserve.contracts.grammar import GrammarCompiler, GrammarContext
from nanoserve.contracts.kvcache import KVCacheShape
from nanoserve.contracts.observer import EngineInfo
from nanoserve.contracts.scheduling import SchedulerLimits
from nanoserve.engine.batch import BatchBuilder, RowState
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.engine import Engine
from nanoserve.engine.guard import block_bytes, check_cache, check_methods
from nanoserve.engine.memory import blocks_on_cpu, blocks_on_gpu, peak_forward_bytes, pool_in_words
from nanoserve.engine.runner import ModelRunner
from nanoserve.engine.sampler import Sampler
from nanoserve.engine.selection import AttentionSelector, candidates_for, make_builder
from nanoserve.engine.structured import Grammars
from nanoserve.models.config import ModelConfig, eos_token_ids
from nanoserve.models.loader import load_model, resolve_dtype, resolve_model
from nanoserve.models.parallel import ParallelContext
from nanoserve.registry import Registry
from nanoserve.tokenizer import Tokenizer, has_tokenizer

if TYPE_CHECKING:
    from nanoserve.contracts.kvcache import KVCacheSpec

log = logging.getLogger("nanoserve")


def build_engine(config: EngineConfig, registry: Registry | None = None) -> Engine:
    """Compose an engine. Whatever cannot work is refused here, most of it before any weight is read.

    Raises ConfigError, PluginError or ModelLoadError.
    """
    registry = registry or Registry.discover()
    options = config.engine
    device = resolve_device(options.device)
    folder = checkpoint_folder(config)
    if folder is not None:
        model_config = ModelConfig.from_folder(folder)
    else:  # random weights of a known shape need no folder, and no network
        model_config = ModelConfig.from_dict(config.model.config or {}, source="model.config")
    dtype = engine_dtype(options.dtype, model_config, folder, device)
    max_model_len = resolve_max_model_len(options, model_config)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    kv_spec: KVCacheSpec = registry.get("kvcache", config.kv.name)
    kv_options = registry.make_options("kvcache", kv_spec, config.kv.options)
    need = Requirements(
        num_q_heads=model_config.num_attention_heads,
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        compute_capability=capability,
        block_size=options.block_size,
        kv_format=config.kv.name,
        kv_dtype=stored_dtype(kv_options),
    )
    if reasons := kv_spec.capabilities.refusals(need):
        raise PluginError(f"kv={kv_spec.name} cannot be used here: {'; '.join(reasons)}")
    graphs = device.type == "cuda" and not options.enforce_eager and kv_spec.capabilities.cuda_graph
    graph_tokens = min(options.graph_max_tokens, options.max_num_batched_tokens) if graphs else 0
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    policy_choice = config.policy_on(device_name, registry.config_paths_for)
    policy_spec = registry.get("policy", policy_choice.name)
    policy = policy_spec.factory(registry.make_options("policy", policy_spec, policy_choice.options))
    candidates = candidates_for(registry, config.attention, need, policy)
    scheduler_spec = registry.get("scheduler", config.scheduler.name)
    scheduler_options = registry.make_options("scheduler", scheduler_spec, config.scheduler.options)
    grammar_spec = registry.get("grammar", config.grammar.name)
    grammar_options = registry.make_options("grammar", grammar_spec, config.grammar.options)

    model = load_model(
        model_config,
        folder,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        parallel=ParallelContext(),
        max_positions=max_model_len,
        seed=options.seed,
    )
    model.pack()
    shape = KVCacheShape(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=options.block_size,
        dtype=dtype,
        device=device,
    )
    kv = kv_spec.factory(kv_options, shape)
    bytes_per_block = block_bytes(kv)
    num_blocks = options.num_kv_blocks
    if num_blocks is None:
        blocks_per_seq = -(-max_model_len // options.block_size)
        if device.type == "cuda":
            width = model.num_q_heads * model_config.head_dim
            step = options.max_num_batched_tokens, options.max_num_seqs
            peak = peak_forward_bytes(model, *step, width, graph_tokens)
            log.info("weights and activations take at most %.2f GiB", peak / 2**30)
            num_blocks = blocks_on_gpu(bytes_per_block, peak, options.gpu_memory_utilization, device) - 1
        else:
            num_blocks = blocks_on_cpu(bytes_per_block, options.max_num_seqs, blocks_per_seq)
    try:
        kv.allocate(num_blocks + 1)  # one more than is handed out: the scratch block takes the writes of padding rows
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the plain one
        size = num_blocks * bytes_per_block / 2**30
        raise ConfigError(
            f"engine.num_kv_blocks={num_blocks}: {size:.1f} GiB for the KV cache could not be allocated; lower it"
        ) from error
    check_cache(kv)
    log.info("KV cache: %s", pool_in_words(shape, num_blocks, bytes_per_block))

    blocks = BlockManager(num_blocks, options.block_size, options.enable_prefix_caching)
    limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens, max_model_len)
    scheduler = scheduler_spec.factory(scheduler_options, limits, blocks)
    check_methods(scheduler, {"schedule": 0, "commit": 1})
    context = AttentionContext(
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model_config.head_dim,
        scale=model_config.head_dim**-0.5,
        dtype=dtype,
        device=device,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv=kv,
    )
    in_graph = replace(need, cuda_graph=True)
    capturable = tuple(
        name
        for name in candidates["decode"]
        if not registry.get("attention", name).capabilities.refusals(in_graph, "decode")
    )
    builder = make_builder(registry, config.attention, context)
    selector = AttentionSelector(candidates, policy, builder, capturable)
    if config.attention.name != "auto":
        selector.build(config.attention.name)  # now, because its factory may still refuse a combination of options
    rows = RowState(2 * options.max_num_seqs, -(-max_model_len // options.block_size), device)
    origin = "has no choice"
    if any(len(names) > 1 for names in candidates.values()):
        origin = config.policy_origin_on(device_name, registry.config_paths_for)
    info = EngineInfo(
        model=config.model.name or str(config.model.path),
        attention={phase: "|".join(names) for phase, names in candidates.items()},
        kv=kv_spec.name,
        scheduler=scheduler_spec.name,
        policy=policy_spec.name,
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        grammar=grammar_spec.name,
        policy_origin=origin,
    )
    attention = "; ".join(f"{phase} {names}" for phase, names in info.attention.items())
    log.info("attention: %s; policy %s (%s)", attention, info.policy, info.policy_origin)
    eos = eos_token_ids(folder) if folder is not None else frozenset()
    tokenizer = Tokenizer(folder) if folder is not None and has_tokenizer(folder) else None

    def grammar_compiler() -> GrammarCompiler:
        assert tokenizer is not None
        context = GrammarContext(model_config.vocab_size, tuple(sorted(eos)), tokenizer.to_json())
        return grammar_spec.factory(grammar_options, context)

    runner = ModelRunner(
        model, kv, selector, BatchBuilder(blocks, rows, device), Sampler(model_config.vocab_size, device),
        capability, options.max_num_seqs, max_model_len,
        decode_graphs=graphs and bool(capturable),
        prefill_graphs=graph_tokens,
    )  # fmt: skip
    if options.graph_capture == "start":
        runner.capture()
    return Engine(
        runner,
        scheduler,
        blocks,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        tokenizer=tokenizer,
        grammars=None if tokenizer is None else Grammars(grammar_compiler),
        observers=registry.observers(info),
        info=info,
        seed=options.seed,
        overlap=device.type == "cuda" if options.overlap is None else options.overlap,
        debug=options.debug,
    )  # fmt: skip


def checkpoint_folder(config: EngineConfig) -> Path | None:
    """Where the files of the model are, fetched if need be; None for random weights of a shape given in the config."""
    return resolve_model(config.model.path) if config.has_checkpoint else None  # type: ignore[arg-type]


def resolve_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device={name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device={name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"engine.device={name!r}: torch sees no CUDA device here; use engine.device=cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"engine.device={name!r}: there are {torch.cuda.device_count()} CUDA devices")
        current = torch.cuda.current_device()  # where Triton launches
        if device.index not in (None, current):
            raise ConfigError(
                f"engine.device={name!r}: the process's current device is cuda:{current}; use engine.device=cuda with "
                f"CUDA_VISIBLE_DEVICES={device.index} in the environment, or call torch.cuda.set_device first"
            )
        device = torch.device("cuda", current)
    return device


def stored_dtype(kv_options: object) -> str | None:
    """``Requirements.kv_dtype`` for these options of a KV format."""
    name = getattr(kv_options, "dtype", "auto")
    return None if name == "auto" else str(name)


def engine_dtype(name: str, config: ModelConfig, folder: Path | None, device: torch.device) -> torch.dtype:
    """``auto``: the checkpoint's dtype on a GPU; on a CPU float32, which holds bf16 weights exactly and is faster."""
    if name == "auto" and device.type == "cpu":
        return torch.float32
    return resolve_dtype(name, config, folder)


def resolve_max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    """The option, or the model's own limit. One above the model's position table is refused: text would rot there."""
    limit = config.max_position_embeddings
    if options.max_model_len is None:
        return limit
    if options.max_model_len > limit:
        raise ConfigError(
            f"engine.max_model_len={options.max_model_len} exceeds the model's max_position_embeddings={limit}; "
            "lower it, or extend the model with YaRN in its config.json"
        )
    return options.max_model_len
