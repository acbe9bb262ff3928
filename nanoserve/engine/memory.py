"""How many KV blocks fit, and the report that says so.

KV bytes per token = ``2 · layers · kv_heads · head_dim · bytes`` (plus scales, if the format has them); a format knows
its own ``bytes_per_block``, which is that times the block size.
"""

from __future__ import annotations

import torch

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import KVCacheShape
from nanoserve.models.qwen3 import Qwen3ForCausalLM

#: Pool of an engine on the CPU unless ``num_kv_blocks`` says otherwise. The pages are committed when first written.
CPU_POOL_BYTES = 1 << 30


class _NoAttention:
    """Stands in for attention while the peak memory of everything else is measured."""

    def attend(self, layer_index: int, qkv: torch.Tensor, q_norm_weight: torch.Tensor, *_: object) -> torch.Tensor:
        return qkv[:, : self.width].contiguous()

    def __init__(self, width: int) -> None:
        self.width = width


@torch.inference_mode()
def peak_forward_bytes(
    model: Qwen3ForCausalLM, num_tokens: int, num_seqs: int, attention_width: int, graph_tokens: int = 0
) -> int:
    """Peak device bytes (weights included) of a forward over ``num_tokens`` that samples ``num_seqs`` tokens.

    Graphs of steps of up to ``graph_tokens`` keep memory of their own, which such a step uses instead; beside graphs
    that are too small for every step it is needed twice.
    """
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    hidden = model.forward(ids, _NoAttention(attention_width))
    logits = model.compute_logits(hidden[:num_seqs])
    probs = torch.softmax(logits, dim=-1)
    del hidden, logits, probs
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    kept = graph_tokens / num_tokens if graph_tokens < num_tokens else 0.0
    return peak + int((peak - weights) * kept)


def blocks_on_gpu(bytes_per_block: int, peak_bytes: int, utilization: float, device: torch.device) -> int:
    """Blocks in ``utilization`` of the GPU's memory beyond the peak and what other processes hold."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    budget = int(total * utilization) - others - peak_bytes
    blocks = budget // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            f"engine.gpu_memory_utilization={utilization} of {total / 2**30:.1f} GiB leaves no room for the KV cache: "
            f"weights and activations peak at {peak_bytes / 2**30:.1f} GiB, others hold {others / 2**30:.1f} GiB"
        )
    return blocks


def blocks_on_cpu(bytes_per_block: int, max_num_seqs: int, blocks_per_seq: int) -> int:
    """Enough for every sequence at full length, or ``CPU_POOL_BYTES``, whichever is less."""
    return max(1, min(max_num_seqs * blocks_per_seq, CPU_POOL_BYTES // bytes_per_block))


def pool_in_words(shape: KVCacheShape, num_blocks: int, bytes_per_block: int) -> str:
    """What was allocated, and the formula that it follows from."""
    tokens, per_token = num_blocks * shape.block_size, bytes_per_block // shape.block_size
    size = num_blocks * bytes_per_block / 2**30
    vectors = 2 * shape.num_layers * shape.num_kv_heads
    return (
        f"{num_blocks} blocks of {shape.block_size} tokens = {tokens} tokens in {size:.2f} GiB; a token takes "
        f"{per_token} bytes = 2 (K and V) · {shape.num_layers} layers · {shape.num_kv_heads} KV heads · "
        f"{per_token / vectors:g} bytes for {shape.head_dim} numbers"
    )
