"""The tiny byte-level tokenizer of the tests: id = byte for 0 … 255, no merges, then three special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tiny_tokenizer(folder: Path, chat_template: str | None = None, **config: object) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with ``config`` on top) to ``folder``; returns it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in symbols.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if chat_template is not None:
        written["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(written | config), encoding="utf-8")
    return folder
