"""Text to token ids and back, by the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoserve.contracts.errors import ModelLoadError, RequestError

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
ROLES = ("system", "user", "assistant", "tool")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


@lru_cache
def _variables_of(template: str) -> frozenset[str]:
    from jinja2 import Environment, meta

    plain = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", template)  # a tag of transformers'
    return frozenset(meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)))


class Tokenizer:
    """A Hugging Face tokenizer from a local folder or hub id; transformers is imported when one is built.

    vocab_size: ids the tokenizer knows, special ones included; a model may have more, which decode to "".
    eos_token_id: None if the tokenizer names none. special_ids: what ``skip_special_tokens`` leaves out.
    Raises ModelLoadError if there is no tokenizer or it is not a fast one (``tokenizer.json``).
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import decoders
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:  # whatever the files provoke in foreign code
            raise ModelLoadError(f"cannot load a tokenizer from {str(path)!r}: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelLoadError(f"{str(path)!r} has no tokenizer.json (found a {type(tokenizer).__name__})")
        self._hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size = len(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._token_bytes = {skip: TokenBytes(self, skip) for skip in (False, True)}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens in it recognised; one BOS in front if the tokenizer adds one."""
        bos = self._hf.bos_token
        return self._encode(text, add_special_tokens=not (bos and isinstance(text, str) and text.startswith(bos)))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; an id outside the tokenizer is "", bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes | None:
        """What each id contributes to the UTF-8 text, or None if that depends on its neighbours (not byte-level)."""
        return self._token_bytes[skip_special_tokens] if self._byte_level else None

    def to_json(self) -> str:
        """The whole tokenizer as the text of a ``tokenizer.json``, for libraries that bring their own."""
        return self._backend.to_str()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template.

        messages: {"role": system | user | assistant | tool, "content": text or a list of {"type": "text"} parts, …}.
        template_kwargs: variables that the template reads (``enable_thinking=False``). Where several templates are
        stored, transformers' precedence decides. Raises RequestError.
        """
        if not self._hf.chat_template:
            raise RequestError("this checkpoint has no chat template: send a plain prompt, or add chat_template.jinja")
        if tools is not None and "tools" not in self._reads(tools):
            raise RequestError("tools: the chat template has no place for them")
        self.check_template_kwargs(template_kwargs, tools)
        checked = _checked_messages(messages)
        try:
            text: Any = self._hf.apply_chat_template(
                checked,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except Exception as error:  # the template is foreign code: raise_exception, undefined names, type errors
            raise RequestError(f"the chat template rejects this conversation: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def check_template_kwargs(self, template_kwargs: Mapping[str, Any], tools: list[Any] | None = None) -> None:
        """Raise RequestError for a variable that the chat template does not read, or that is not for callers to set."""
        import inspect

        for name, value in template_kwargs.items():
            where = f"chat_template_kwargs.{name}"
            ours = {*inspect.signature(self._hf.apply_chat_template).parameters, "messages"} - {"documents"}
            ours |= {*self._hf.special_tokens_map, "raise_exception", "strftime_now"}
            known = self._reads(tools) - ours
            if name not in known:
                has = ", ".join(sorted(known)) or "none"
                raise RequestError(f"{where}: the chat template has no such variable to set; it has {has}")
            if name == "enable_thinking" and not isinstance(value, bool):  # "false" would be taken for true
                raise RequestError(f"{where} must be true or false, not {value!r}")

    def _reads(self, tools: list[Any] | None) -> frozenset[str]:
        """The variables that the chat template reads, of several the one for ``tools``."""
        if not self._hf.chat_template:
            return frozenset()
        try:
            return _variables_of(self._hf.get_chat_template(tools=tools))
        except Exception as error:  # what is stored is foreign
            raise RequestError(f"the chat template cannot be read: {error}") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}")
        try:
            return self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except TypeError as error:  # how the tokenizer says that a string cannot be written as UTF-8
            raise RequestError("a prompt must be valid Unicode; this one has unpaired surrogates") from error


class TokenBytes(dict[int, bytes]):
    """``table[token_id]``: the bytes a byte-level token stands for, found on first use (a vocabulary has 150,000)."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._id_to_token = tokenizer._backend.id_to_token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        try:
            value = bytes(BYTE_OF_SYMBOL[symbol] for symbol in token or "")
        except KeyError:  # an added token with characters beyond the byte alphabet stands for itself
            value = (token or "").encode()
        self[token_id] = value
        return value


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's byte alphabet: a printable Latin-1 byte is its own character, the others follow from U+0100 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_SYMBOL = _byte_of_symbol()


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with text content, as templates for text models expect them; RequestError names the wrong field."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of at least one message")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be a mapping with role and content, not {message!r}")
        if message.get("role") not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {message.get('role')!r}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        elif isinstance(content, list | tuple):
            content = "".join(_text_of_part(f"{where}.content[{j}]", part) for j, part in enumerate(content))
        elif not isinstance(content, str):
            raise RequestError(f"{where}.content must be text or a list of text parts, not {content!r}")
        checked.append({**message, "content": content})
    return checked


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise RequestError(f'{where} must be {{"type": "text", "text": …}}: this model reads text only')
