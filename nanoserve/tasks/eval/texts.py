"""The texts that are scored: the held-out part of the embedded checkpoint's corpus, or what the user points at."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nanoserve.contracts.errors import ConfigError

Document = tuple[str, str]  # name, text


def heldout_documents() -> list[Document]:
    """Held-out files of the running Python's standard library, in an order that depends on their paths alone.

    Another Python version has other texts under these paths: compare numbers of one machine, not across machines.
    """
    from nanoserve.assets.tiny.train import corpus_files

    return sorted(corpus_files("heldout"), key=lambda file: hashlib.sha256(file[0].encode()).digest())


def documents_in(path: Path) -> list[Document]:
    """A text file, or all files below a folder that are UTF-8 text (hidden ones left out), sorted by path."""
    if not path.exists():
        raise ConfigError(f"eval.text: {str(path)!r} does not exist")
    if path.is_file():
        files = [path]
    else:
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    found = [(str(file), text) for file in files if (text := _read(file)) is not None]
    if not found:
        raise ConfigError(f"eval.text: {str(path)!r} holds no UTF-8 text")
    return found


def _read(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if text.strip() and "\0" not in text else None


def cut(documents: list[Document], max_bytes: int | None) -> list[Document]:
    """The first ``max_bytes`` UTF-8 bytes of all documents together, cut after a line where there is one to cut at."""
    if max_bytes is None:
        return documents
    kept: list[Document] = []
    for name, text in documents:
        encoded = text.encode()
        if len(encoded) <= max_bytes:
            kept.append((name, text))
            max_bytes -= len(encoded)
            continue
        encoded = encoded[:max_bytes]
        encoded = encoded[: encoded.rfind(b"\n") + 1] or encoded
        if rest := encoded.decode(errors="ignore"):  # a last character may be cut in two
            kept.append((name, rest))
        break
    return kept
