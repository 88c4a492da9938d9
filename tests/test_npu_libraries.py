"""Finding the libraries of a toolkit beside others that are in the process."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from stand_in import build, compiler

MAPPED = """
    import ctypes, os
    import numpy as np

    def mapped():
        \"\"\"The toolkits' libraries in this process.\"\"\"
        with open("/proc/self/maps") as lines:
            paths = {line.split(None, 5)[5].strip() for line in lines if ".so" in line}
        names = "libopapi", "libacl", "libascend", "libnnop"
        return sorted(path for path in paths if os.path.basename(path).startswith(names))
"""
USE = """
    import ascend_grad as ag
    print(ag.softmax(np.zeros(2, np.float32)), ag.backends()["npu"].reason)
    print(*mapped(), sep="\\n")
"""
FOUND = "[0.5 0.5] 2 cards, Ascend910B2"


@pytest.fixture
def toolkits(tmp_path: Path) -> tuple[Path, Path]:
    """Two installations of the same, in different places."""
    return tuple(shutil.copytree(build("split"), tmp_path / name) for name in ("first", "second"))


def script(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in parts)


@pytest.mark.parametrize(
    "libraries",
    [
        ("libascendcl.so",),
        ("libascendcl.so", "libnnopbase.so"),
        ("libascendcl.so", "libnnopbase.so", "libopapi_math.so", "libopapi_nn.so"),
    ],
    ids=len,
)
def test_what_is_mapped_already_is_used(libraries, toolkits, run_script) -> None:
    """And what is not comes from the same place: there is no second copy of a toolkit in the process."""
    first, second = toolkits
    load = f"""
    for name in {libraries!r}:
        ctypes.CDLL({str(first)!r} + "/lib64/" + name)
    """
    result = run_script(script(MAPPED, load, USE), ASCEND_HOME_PATH=str(second))
    found, *mapped = result.stdout.splitlines()
    assert found == FOUND
    assert len(mapped) == 4
    assert all(path.startswith(f"{first}/") for path in mapped), mapped


def test_a_mapped_family_goes_before_newer_ones_in_a_folder(tmp_path, run_script) -> None:
    home = shutil.copytree(build("split_without_math"), tmp_path / "both")
    shutil.copy(build("split") / "lib64" / "libopapi_math.so", home / "lib64")
    load = f"""
    for name in ("libascendcl.so", "libopapi.so"):
        ctypes.CDLL({str(home)!r} + "/lib64/" + name)
    """
    result = run_script(script(MAPPED, load, USE), ASCEND_HOME_PATH=str(home))
    found, *mapped = result.stdout.splitlines()
    assert found == FOUND
    assert [Path(path).name for path in mapped] == ["libascendcl.so", "libnnopbase.so", "libopapi.so"]
    without = run_script(script(MAPPED, USE), ASCEND_HOME_PATH=str(home))
    names = [Path(path).name for path in without.stdout.splitlines()[1:]]
    assert names == ["libascendcl.so", "libnnopbase.so", "libopapi_math.so", "libopapi_nn.so"]


def test_the_newer_name_of_the_runtime(tmp_path, run_script) -> None:
    """It is taken where it is mapped, though there is one of the older name, too."""
    first, second = (shutil.copytree(build("split"), tmp_path / name) for name in ("first", "second"))
    source = tmp_path / "forward.c"
    source.write_text("")
    lib64 = first / "lib64"
    command = ("-shared", "-o", lib64 / "libacl_rt.so", "-Wl,-soname,libacl_rt.so", "-Wl,--no-as-needed", source)
    subprocess.run(
        [*compiler(), *map(str, command), "-L", lib64, "-l:libascendcl.so", "-Wl,-rpath,$ORIGIN"], check=True
    )
    load = f"""
    ctypes.CDLL({str(lib64 / "libacl_rt.so")!r})
    """
    result = run_script(script(MAPPED, load, USE), ASCEND_HOME_PATH=str(second))
    found, *mapped = result.stdout.splitlines()
    assert found == FOUND
    assert all(path.startswith(f"{first}/") for path in mapped), mapped


def library_that_speaks(path: Path) -> None:
    """A library that says when it is opened."""
    source = path.with_suffix(".c")
    source.write_text(
        f"""
        #include <stdio.h>
        __attribute__((constructor)) static void opened(void) {{ puts("{path.name} was opened"); fflush(stdout); }}
        __attribute__((destructor)) static void closed(void) {{ puts("{path.name} was closed"); fflush(stdout); }}
        """
    )
    command = [*compiler(), "-shared", "-fPIC", "-o", path, f"-Wl,-soname,{path.name}", source]
    subprocess.run(list(map(str, command)), check=True)
    source.unlink()


@pytest.mark.parametrize("alone", ["libopapi_math.so", "libaclnn_ops_infer.so", "libaclnn_ops_train.so"])
def test_a_part_of_a_family_is_not_opened(alone, tmp_path, run_script) -> None:
    """The first folder has a part of one family, the second a whole one."""
    (tmp_path / "lib64").mkdir()
    for name in ("libascendcl.so", "libnnopbase.so", "libcann_stand_in.so"):
        shutil.copy(build("aggregate") / "lib64" / name, tmp_path / "lib64")
    library_that_speaks(tmp_path / "lib64" / alone)
    result = run_script(
        script(MAPPED, USE), ASCEND_HOME_PATH=str(tmp_path), ASCEND_TOOLKIT_HOME=str(build("aggregate"))
    )
    assert result.stdout.splitlines()[0] == FOUND


def test_nothing_is_opened_beside_a_part_of_a_family(tmp_path, run_script) -> None:
    """One of the two is no library. What was opened before is not closed, so another family would not be alone."""
    (tmp_path / "lib64").mkdir()
    for name in ("libascendcl.so", "libnnopbase.so", "libcann_stand_in.so"):
        shutil.copy(build("aggregate") / "lib64" / name, tmp_path / "lib64")
    library_that_speaks(tmp_path / "lib64" / "libaclnn_ops_train.so")
    (tmp_path / "lib64" / "libaclnn_ops_infer.so").write_text("no library")
    use = """
    import ascend_grad as ag
    print(ag.softmax(np.zeros(2, np.float32)), ag.backends()["npu"].reason, flush=True)
    import sys
    sys.stdout.flush()
    os._exit(0)
    """
    result = run_script(
        script(MAPPED, use), ASCEND_HOME_PATH=str(tmp_path), ASCEND_TOOLKIT_HOME=str(build("aggregate"))
    )
    opened, found = result.stdout.splitlines()
    assert opened == "libaclnn_ops_train.so was opened"
    assert found.startswith(f"[0.5 0.5] {tmp_path}/lib64/libaclnn_ops_infer.so does not load: ")
    assert result.stderr.count("\n") == 1


def test_a_part_of_a_family_alone_is_told(tmp_path, run_script) -> None:
    shutil.copytree(build("split"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "lib64" / "libopapi_math.so").unlink()
    result = run_script(script(MAPPED, USE), ASCEND_HOME_PATH=str(tmp_path), ASCEND_TOOLKIT_HOME="")
    assert "libopapi_nn.so does not load: libopapi_math.so is not beside it" in result.stdout


def test_a_toolkit_without_a_card_is_no_warning(run_script) -> None:
    use = """
    import logging
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    import ascend_grad as ag
    print(ag.softmax(np.zeros(2, np.float32)), ag.explain("softmax", np.zeros(2, np.float32)).backend)
    """
    result = run_script(script(MAPPED, use), ASCEND_HOME_PATH=str(build("device_lost")))
    assert result.stdout == "[0.5 0.5] cpu\n"
    assert result.stderr.startswith("INFO no Ascend NPU: aclrtGetDeviceCount failed: ")
    assert "207004 ACL_ERROR_RT_NO_DEVICE" in result.stderr
    assert result.stderr.count("\n") == 1
    failing = run_script(
        script(MAPPED, use), ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_FAIL="aclInit:0:207004"
    )
    assert failing.stdout == "[0.5 0.5] cpu\n"
    assert failing.stderr.startswith("INFO no Ascend NPU: aclInit failed: 207004 ACL_ERROR_RT_NO_DEVICE")
