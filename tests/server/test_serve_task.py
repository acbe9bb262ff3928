"""``task=serve`` on the command line: what it refuses before anything slow begins."""

from __future__ import annotations

import socket

import pytest

from nanoserve.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=70000"], "port must be between 0 and 65535"),
        (["max_queue=-1"], "max_queue must be at least 0"),
        (["request_timeout=0"], "request_timeout must be above 0"),
        (["host=256.1.1.1"], "cannot listen on"),
        (["sampling.n=2"], "sampling.n"),
        (["ports=1"], "ports"),
        (["-m", "port=1,2"], "cannot be part of a sweep"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["task=serve", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["task=serve", f"port={taken.getsockname()[1]}"]) == 2
    assert "Address already in use" in capsys.readouterr().err
