"""Check an installed wheel: check_install.py SOURCES SDIST INSTALLED.

SOURCES is the source tree; SDIST is the unpacked sdist that the wheel was made from, which must hold all that is
compiled; INSTALLED is the package folder of an installation made directly from the sources, which must hold the same
files as the wheel's.
"""

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

# Only what the library itself costs counts: NumPy is there already in any program that calls it.
IMPORT_TIME = """
import sys, time, numpy
began = time.perf_counter()
import ascend_grad
print(time.perf_counter() - began)
late = {"scipy", "tqdm", "matplotlib", "torch", "jax"} & set(sys.modules)
assert not late, f"imported at import: {late}"
"""
IMPORT_LIMIT = 0.150

#: Programs, declarations and headers. Results, documents and tests stay with the sources.
SUFFIXES = {".c", ".h", ".pxd", ".py", ".pyi", ".so", ".typed"}


def files(folder: Path, pattern: str = "*") -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def main(sources: Path, sdist: Path, other: Path) -> None:
    import ascend_grad

    package = Path(ascend_grad.__file__).parent
    assert "site-packages" in package.parts, package
    assert ascend_grad.__version__ == importlib.metadata.version("ascend-grad")

    for folder in ("pyx", "include"):
        assert files(sdist / folder) == files(sources / folder), folder

    here = files(package)
    assert here == files(other), f"sdist and source tree build different wheels: {sorted(here ^ files(other))}"
    assert "py.typed" in here
    assert {Path(name).suffix for name in here} == SUFFIXES
    assert {f"bench/{name}" for name in files(sources / "bench", "*.py")} <= here
    missing = {name for name in files(sources / "ascend_grad") if name.endswith((".py", ".pxd"))} - here
    assert not missing, missing

    include = Path(ascend_grad.get_include())
    assert package in include.parents, include
    assert files(include) == files(sources / "include", "*.h")

    compiled = sorted(name for name in here if name.endswith(".so"))
    stems = {name.partition(".")[0] for name in compiled}
    expected = {path.stem for path in (sources / "pyx").rglob("*.pyx")}
    assert expected <= stems, expected - stems
    stubs = {path.name for path in (sources / "pyx").rglob("*.pyi")}
    assert stubs <= here, stubs - here
    for stem in sorted(stems):
        importlib.import_module(f"ascend_grad.{stem}")
        assert f"{stem}.py" not in here, f"{stem} is both Python and compiled"
    for name in compiled:
        print(f"{name}: {os.path.getsize(package / name) / 1024:.0f} KiB")

    importlib.import_module("ascend_grad.bench")
    scripts = importlib.metadata.distribution("ascend-grad").entry_points.select(group="console_scripts")
    assert [script.name for script in scripts] == ["ascend-grad"]
    assert callable(scripts["ascend-grad"].load())

    command = [sys.executable, "-c", IMPORT_TIME]
    seconds = min(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(7))
    print(f"import beyond NumPy: {seconds * 1e3:.0f} ms")
    assert seconds < IMPORT_LIMIT, f"limit {IMPORT_LIMIT * 1e3:.0f} ms"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
