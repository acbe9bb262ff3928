"""The built wheel in a fresh environment, run from an empty folder that cannot be written (C47)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "nanoserve", "plugins", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """An environment with the wheel installed; its dependencies, but no editable install, are borrowed from ours."""
    folder = wheel.parent / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # Python ignores the .pth files inside a folder that a .pth file names, and an editable install is one of those.
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    folder.chmod(0o555)
    return folder


def run(environment: Path, cwd: Path, *command: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program, *arguments = command
    process = subprocess.run(
        [environment / "bin" / program, *arguments], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert list(cwd.iterdir()) == []
    return process.stdout


def test_the_wheel_holds_what_the_repository_holds(wheel: Path) -> None:
    """Every module and every YAML; nothing called ``plugins`` or ``conf`` or ``tests`` reaches site-packages."""
    names = set(zipfile.ZipFile(wheel).namelist())
    moved = {"conf": "nanoserve/conf", "plugins": "nanoserve_plugins", "nanoserve": "nanoserve"}
    for folder, target in moved.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".json", ".jinja", ".safetensors") and "__pycache__" not in file.parts:
                assert f"{target}/{file.relative_to(ROOT / folder)}" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nanoserve", "nanoserve_plugins"}


def test_it_runs_from_an_empty_read_only_folder(environment: Path, empty: Path, tiny_checkpoint: Path) -> None:
    where = run(environment, empty, "python", "-c", "import nanoserve, nanoserve_plugins; print(nanoserve.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    assert "Groups (GROUP=NAME" in run(environment, empty, "nanoserve", "--help")
    assert "name: int8" in run(environment, empty, "python", "-m", "nanoserve", "--cfg", "job", "kv=int8")
    model = [f"model={tiny_checkpoint}", "engine.max_model_len=64", "sampling.max_tokens=4"]
    assert len(run(environment, empty, "nanoserve", *model, "prompt=import json")) > 1


def test_a_sweep_writes_where_it_is_told(environment: Path, empty: Path, tmp_path: Path) -> None:
    """C47: the output directory is configurable, for a folder that cannot be written."""
    sweep = ["-m", "task=plugins", "format=markdown,table", f"hydra.sweep.dir={tmp_path}/sweep"]
    assert "2 jobs" in run(environment, empty, "nanoserve", *sweep)
    assert (tmp_path / "sweep" / "1" / "result.json").is_file()
