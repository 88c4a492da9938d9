"""Test imports of the library in surroundings that stop careless programs, and a first call there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_grad as ag

PROGRAM = """
import numpy as np
import ascend_grad as ag
assert ag.softmax(np.ones((300, 400), np.float32), num_threads=2).shape == (300, 400)
assert ag.explain("softmax", [1.0]).backend == "cpu"
assert ag.backends()["cpu"].usable
assert ag.show_config(mode="dict")["cpu"]
"""

OPTIONS = [
    "-X dev -X warn_default_encoding",
    "-X utf8=0",
    "-OO",
    "-I",
    "-bb",
]


def run(command: list, check: bool = True, **settings) -> subprocess.CompletedProcess:
    result = subprocess.run(command, capture_output=True, **settings)
    if check:
        assert (result.returncode, result.stderr) == (0, b""), result.stderr.decode(errors="replace")
    return result


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_python(options):
    run([sys.executable, "-P", "-W", "error", *options.split(), "-c", PROGRAM])


@pytest.mark.parametrize(
    "environment",
    [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"HOME": "/nonexistent"}],
    ids=["empty", "C", "no home"],
)
def test_environments(environment):
    run([sys.executable, "-P", "-W", "error", "-c", PROGRAM], env=environment)


def test_paths_that_are_no_text():
    """A toolkit's folder that is no text in any encoding is searched, in vain."""
    environment = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    run([sys.executable, "-P", "-c", PROGRAM], env=environment | {b"ASCEND_HOME_PATH": b"/opt/\xff\xfe"})


def test_no_standard_streams():
    run([sys.executable, "-P", "-c", f"import sys; sys.stdin = sys.stdout = sys.stderr = None\n{PROGRAM}"])
    closed = "import os, sys; [os.close(number) for number in range(3)]; os.execv(sys.argv[1], sys.argv[1:])"
    run([sys.executable, "-c", closed, sys.executable, "-P", "-c", PROGRAM])


def test_a_working_folder_that_was_deleted(tmp_path):
    (tmp_path / "folder").mkdir()
    start = f"import os; os.rmdir({str(tmp_path / 'folder')!r})\n{PROGRAM}"
    run([sys.executable, "-P", "-W", "error", "-c", start], cwd=tmp_path / "folder")


def run_after_mount(mount: str) -> None:
    """Run the program in a separate mount namespace, after a command that mounts something there."""
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if not shutil.which("unshare") or run([*command, "true"], check=False).returncode != 0:
        pytest.skip("cannot mount files and folders")
    run([*command, sys.executable, "-P", "-W", "error", "-c", PROGRAM])


def test_no_proc_and_no_sys(tmp_path):
    run_after_mount(f"mount --bind {tmp_path} /proc && mount --bind {tmp_path} /sys")


def test_a_control_group_that_is_no_text(tmp_path):
    """The kernel names the control groups of a process in bytes of no encoding."""
    (tmp_path / "cgroup").write_bytes(b"0::/job \xff\xe9\n")
    run_after_mount(f"mount --bind {tmp_path}/cgroup /proc/$$/cgroup")


def test_no_module_needs_a_recent_libgomp():
    """Another library may have loaded an older libgomp, which the modules then use."""
    modules = list(Path(ag.__file__).parent.glob("*.so"))
    assert modules
    for module in modules:
        assert b"OMP_5" not in module.read_bytes(), module


@pytest.mark.parametrize(
    ("library", "newer", "text"),
    [
        ("torch", "torch.accelerator", "ascend_grad.torch needs torch 2.6 or newer, found 2."),
        ("jax", "jax.enable_x64", "ascend_grad.jax needs JAX 0.8 or newer, found "),
    ],
)
def test_libraries_that_are_too_old(library, newer, text, run_script):
    pytest.importorskip(library)
    run_script(
        f"""
        import {library}
        del {newer}
        try:
            import ascend_grad.{library}
        except ImportError as error:
            assert str(error).startswith({text!r}), error
        else:
            raise AssertionError
        """
    )
