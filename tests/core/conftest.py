"""Tiny checkpoints, built once per session, and chance that repeats itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_model import build_tiny_model
from tests.helpers.tiny_tokenizer import save_tiny_tokenizer


class TinyModels:
    """``models(seed=0, **overrides) -> (folder, Hugging Face model)``, remembered."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._built: dict[str, tuple[Path, Any]] = {}

    def __call__(self, seed: int = 0, **overrides: Any) -> tuple[Path, Any]:
        key = f"{seed}-{overrides!r}"
        if key not in self._built:
            folder = self.root / f"model{len(self._built)}"
            self._built[key] = folder, build_tiny_model(folder, seed, **overrides)
        return self._built[key]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny checkpoint with the byte-level tokenizer beside it, and its Hugging Face model."""
    folder = tmp_path_factory.mktemp("tiny-text")
    oracle = build_tiny_model(folder, seed=0)
    save_tiny_tokenizer(folder)
    return folder, oracle


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)
