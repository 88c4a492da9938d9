"""Build the modules of Cython users, by setuptools and against the installed package."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import ascend_grad

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cython.md"


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def build(folder: Path, setup: str, **sources: str) -> Callable[[str], ModuleType]:
    """Build modules in a folder, and return a function that imports a module from there."""
    for name, source in sources.items():
        (folder / f"{name}.pyx").write_text(source)
    (folder / "setup.py").write_text(setup)
    command = [sys.executable, "-P", "setup.py", "-q", "build_ext", "--inplace"]
    # Cython looks for declarations on the path, where an editable installation is not. The modules are not optimised,
    # which would take two thirds of the time: they only call kernels that are built already.
    environment = os.environ | {"PYTHONPATH": str(Path(ascend_grad.__file__).parents[1]), "CFLAGS": "-O0"}
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"

    def imported(name: str) -> ModuleType:
        (path,) = folder.glob(f"{name}.*.so")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return imported


def built_like_heads(name: str, tmp_path_factory, language: str = "c") -> ModuleType:
    """Build a module of this folder as the page builds its module."""
    (setup,) = blocks("python")
    source = f"# distutils: language = {language}\n" + (HERE / f"{name}.pyx").read_text()
    return build(tmp_path_factory.mktemp(name), setup.replace("heads", name), **{name: source})(name)


@pytest.fixture(scope="session")
def heads(tmp_path_factory) -> ModuleType:
    """Build the module that the page shows."""
    (module,), (setup,) = blocks("cython"), blocks("python")
    return build(tmp_path_factory.mktemp("heads"), setup, heads=module)("heads")


@pytest.fixture(scope="session")
def calls(tmp_path_factory) -> ModuleType:
    """Build the module with calls of the row-wise operators."""
    return built_like_heads("calls", tmp_path_factory)


@pytest.fixture(scope="session")
def linear_calls(tmp_path_factory) -> ModuleType:
    """Build the module with calls of the linear operators."""
    return built_like_heads("linear_calls", tmp_path_factory)


@pytest.fixture(scope="session")
def calls_in_cpp(tmp_path_factory) -> ModuleType:
    """Build the first of these modules as C++."""
    return built_like_heads("calls", tmp_path_factory, "c++")


@pytest.fixture(scope="session")
def linear_calls_in_cpp(tmp_path_factory) -> ModuleType:
    """Build the second of these modules as C++."""
    return built_like_heads("linear_calls", tmp_path_factory, "c++")
