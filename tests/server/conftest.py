"""Servers that several modules share: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.helpers.serving import Server  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded checkpoint with the defaults, but for a short context and the audit of blocks after every step."""
    running = Server(
        tmp_path_factory.mktemp("server"), "engine.max_model_len=256", "engine.num_kv_blocks=64", "engine.debug=true"
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
