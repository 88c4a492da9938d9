"""Test that a door without its library names the package to install, and that no message names an extra."""

from __future__ import annotations

from pathlib import Path

import pytest

import ascend_grad as ag


@pytest.mark.parametrize(("library", "package"), [("torch", "torch"), ("jax", "jax"), ("dask", "'dask[array]'")])
def test_a_missing_library(library, package, run_script):
    script = f"""
        import sys
        sys.modules["{library}"] = None
        try:
            import ascend_grad.{library}
        except ImportError as error:
            print(error)
    """
    assert f"(pip install {package})" in run_script(script).stdout


def test_no_message_names_an_extra():
    files = Path(ag.__file__).parent.rglob("*.py")
    assert not [file for file in files if "ascend-grad[" in file.read_text(encoding="utf-8")]
