"""Test installations without optional packages: what a door says, and which tests are collected.

A door without its library names the package to install. Tests that need a missing package are not collected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ascend_grad as ag


@pytest.mark.parametrize(
    ("library", "package"),
    [("torch", "torch"), ("jax", "jax"), ("dask", "'dask[array]'"), ("sklearn", "scikit-learn")],
)
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


def test_tests_are_collected_without_optional_packages(optional_packages, run_script):
    """Every file that needs an optional package is in a table of conftest.py, and all other files can be imported."""
    script = f"""
        import os, sys
        from importlib.machinery import PathFinder

        import pytest

        class OtherPackages(PathFinder):
            @classmethod
            def find_spec(cls, name, *more):
                return None if name in {optional_packages} else super().find_spec(name, *more)

        class FilesAlone:
            def pytest_pycollect_makeitem(self):
                return []  # without the tests of each file, which take most of the time to make

        sys.meta_path[sys.meta_path.index(PathFinder)] = OtherPackages
        os.chdir({str(Path(__file__).parents[2])!r})
        sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], [FilesAlone()]))
    """
    run_script(script, PYTEST_ADDOPTS="")


def test_no_message_names_an_extra():
    files = Path(ag.__file__).parent.rglob("*.py")
    assert not [file for file in files if "ascend-grad[" in file.read_text(encoding="utf-8")]
