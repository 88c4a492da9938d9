"""Make copies of the package with one deliberate break each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from stand_in import build, compiler

import ascend_grad as ag

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ag.__file__).parent


def run(*command: str | Path, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **settings)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that imports the copy in this folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_GRAD_")}
    return inherited | {"PYTHONPATH": str(folder)}


def copy_of_the_package(folder: Path) -> None:
    """Copy the installed package, and the sources of its compiled modules."""
    for name in ("pyx", "include"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(
        PACKAGE,
        folder / "ascend_grad",
        ignore=shutil.ignore_patterns("__pycache__", "include", "bench"),
        copy_function=lambda source, target: (
            os.symlink(source, target) if source.endswith(".so") else shutil.copy(source, target)
        ),
    )
    for declarations in (ROOT / "pyx").rglob("*.pxd"):  # Cython finds declarations by the name of the package
        shutil.copy(declarations, folder / "ascend_grad")
    # The modules of a wheel look for OpenMP's library in ascend_grad.libs, beside the package.
    libraries = PACKAGE.with_name("ascend_grad.libs")
    if libraries.is_dir():
        os.symlink(libraries, folder / libraries.name)


def problems_of(folder: Path, check: str, *arguments: str) -> str:
    """Run a check of the NPU backend on the copy in this folder, and return its output, empty without errors."""
    home = build("split")
    settings = environment(folder) | {"ASCEND_HOME_PATH": str(home), "OMP_NUM_THREADS": "1"}
    done = run(sys.executable, "-P", "-c", check, Path(__file__).parent, home, *arguments, env=settings, timeout=280)
    crash = f"ended with {done.returncode}\n{done.stderr}" if done.returncode else ""
    return done.stdout + crash


def replace(path: Path, right: str, wrong: str) -> None:
    text = path.read_text()
    assert right in text, f"{path.name} has changed: adapt this break"
    path.write_text(text.replace(right, wrong))


def compile_module(folder: Path, module: str, directives: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> None:
    """Compile a module of the copy in place, without optimisation unless the flags ask for it."""
    generated = folder / f"{module}.c"
    options = "-3", "--module-name", f"ascend_grad.{module}", "-I", folder, *directives
    (source,) = (folder / "pyx").rglob(f"{module}.pyx")
    done = run(sys.executable, "-m", "cython", *options, source, "-o", generated)
    assert done.returncode == 0, done.stderr
    result = folder / "ascend_grad" / (module + sysconfig.get_config_var("EXT_SUFFIX"))
    result.unlink(missing_ok=True)
    arguments = "-shared", "-fPIC", "-O0", "-w", "-I", sysconfig.get_path("include"), "-I", folder / "include", *flags
    done = run(*compiler(), *arguments, generated, "-o", result)
    assert done.returncode == 0, done.stderr
