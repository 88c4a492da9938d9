"""Test which of several copies of a toolkit's libraries is used, and the initialisation with torch_npu."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from stand_in import build, compiler

import ascend_grad as ag

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
FOUND = "[0.5 0.5] 2 devices, Ascend910B2"


@pytest.fixture
def toolkits(tmp_path: Path) -> tuple[Path, Path]:
    """Return two copies of an installation in different places."""
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
    """Libraries that are not mapped yet come from the same folder, so that a process has one copy of a toolkit."""
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


def test_a_mapped_part_of_a_family_is_not_opened_again(toolkits, run_script) -> None:
    first, second = toolkits
    load = f"""
    ctypes.CDLL({str(first)!r} + "/lib64/libopapi_math.so")
    """
    result = run_script(script(MAPPED, load, USE), ASCEND_HOME_PATH=str(second))
    found, *mapped = result.stdout.splitlines()
    assert found == FOUND
    assert [path for path in mapped if "math" in path] == [f"{first}/lib64/libopapi_math.so"]


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
    """A mapped libacl_rt.so is used, although the folder also has a libascendcl.so."""
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
    """Build a library that prints when it is opened and closed."""
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
    """The second folder is used if the first folder has only part of a family of libraries."""
    (tmp_path / "lib64").mkdir()
    for name in ("libascendcl.so", "libnnopbase.so", "libcann_stand_in.so"):
        shutil.copy(build("aggregate") / "lib64" / name, tmp_path / "lib64")
    library_that_speaks(tmp_path / "lib64" / alone)
    result = run_script(
        script(MAPPED, USE), ASCEND_HOME_PATH=str(tmp_path), ASCEND_TOOLKIT_HOME=str(build("aggregate"))
    )
    assert result.stdout.splitlines()[0] == FOUND


def test_nothing_is_opened_beside_a_part_of_a_family(tmp_path, run_script) -> None:
    """If one library of a family cannot be opened, no other family is opened, since the opened library stays open."""
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
    assert "libopapi_nn.so does not load: libopapi_math.so is not in the same folder" in result.stdout


def test_a_toolkit_without_a_device_is_no_warning(run_script) -> None:
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


# ---- torch_npu -------------------------------------------------------------------------------------------------------

TORCH = """
    import ctypes, os, sys, types
    import numpy as np
    runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
    calls = []

    def init():
        calls.append(runtime.aclInit(None))
        {body}

    torch_npu = types.ModuleType("torch_npu")
    torch_npu.npu = types.ModuleType("torch_npu.npu")
    torch_npu.npu.init = init
    sys.modules["torch_npu"] = torch_npu
    sys.modules["torch_npu.npu"] = torch_npu.npu

    import logging
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    import ascend_grad as ag
    assert calls == [], "at import"
    x = np.zeros(2, np.float32)
"""


def with_torch(run_script, body: str, use: str, variant: str = "split", **environment: str):
    text = textwrap.dedent(TORCH).replace("{body}", body) + textwrap.dedent(use)
    return run_script(text, ASCEND_HOME_PATH=str(build(variant)), **environment)


def test_torch_npu_initialises_the_runtime_first(run_script, tmp_path) -> None:
    report = tmp_path / "report"
    use = """
    for _ in range(2):
        print(ag.softmax(x, backend="npu"), calls)
    """
    result = with_torch(run_script, "pass", use, CANN_STAND_IN_REPORT=str(report))
    assert result.stdout == "[0.5 0.5] [0]\n" * 2  # torch_npu called aclInit before the library did
    assert result.stderr == ""
    lines = dict(line.split(None, 1) for line in report.read_text().splitlines())
    # The library's initialisation has ended, torch_npu's has not.
    assert (lines["initialisations"], "violation" in lines) == ("1", False)


def test_the_device_that_torch_npu_binds_the_thread_to(run_script) -> None:
    use = "print(ag.npu.asarray(x).device, ag.npu.get_device())"
    result = with_torch(run_script, "assert runtime.aclrtSetDevice(1) == 0", use)
    assert result.stdout == "1 1\n"


def test_a_thread_that_was_bound_before_stays_so(run_script) -> None:
    use = """
    assert runtime.aclInit(None) == 0
    assert runtime.aclrtSetDevice(1) == 0
    print(ag.npu.asarray(x).device, calls)
    """
    result = with_torch(run_script, "assert runtime.aclrtSetDevice(0) == 0", use)
    assert result.stdout == "1 [100002]\n"


@pytest.mark.parametrize("body", ["raise RuntimeError('broken')", "del torch_npu.npu; torch_npu.npu", "raise OSError"])
def test_torch_npu_that_does_not_initialise(body, run_script) -> None:
    """If torch_npu does not initialise, the library initialises the runtime itself, and warns."""
    use = "print(ag.softmax(x, backend='npu'), ag.softmax(x), len(calls))"
    result = with_torch(run_script, body, use)
    assert result.stdout == "[0.5 0.5] [0.5 0.5] 1\n"
    assert result.stderr.startswith("WARNING torch_npu.npu.init() failed (")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["None", "types.ModuleType('torch_npu')"])
def test_torch_npu_that_is_not_there_as_a_whole(module, run_script) -> None:
    """A torch_npu whose import failed, or is under way, is not used."""
    use = f"""
    sys.modules["torch_npu"] = {module}
    print(ag.softmax(x, backend="npu"), calls)
    """
    result = with_torch(run_script, "pass", use)
    assert result.stdout == "[0.5 0.5] []\n"


def test_without_a_device_a_failing_torch_npu_is_no_warning(run_script) -> None:
    use = "print(ag.softmax(x), ag.explain('softmax', x).backend)"
    result = with_torch(run_script, "raise RuntimeError('no device')", use, variant="device_lost")
    assert result.stdout == "[0.5 0.5] cpu\n"
    assert result.stderr == ""


def test_torch_npu_is_left_alone_without_a_toolkit(run_script, tmp_path) -> None:
    use = """
    os.environ["ASCEND_HOME_PATH"] = os.environ["ASCEND_TOOLKIT_HOME"] = ""
    print(ag.softmax(x), calls)
    """
    text = textwrap.dedent(TORCH).replace("{body}", "pass").replace("runtime = ctypes", "runtime = 0 and ctypes")
    result = run_script(text + textwrap.dedent(use), ASCEND_HOME_PATH="")
    assert result.stdout == "[0.5 0.5] []\n"


def test_torch_npu_is_never_imported(run_script, tmp_path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported')")
    use = """
    import sys
    sys.path.insert(0, os.environ["TORCH"])
    import ascend_grad as ag
    print(ag.softmax(np.zeros(2, np.float32), backend="npu"), "torch_npu" in sys.modules)
    """
    result = run_script(script(MAPPED, use), ASCEND_HOME_PATH=str(build("split")), TORCH=str(tmp_path))
    assert result.stdout == "[0.5 0.5] False\n"


@pytest.mark.parametrize(
    ("macros", "is_bound"),
    [
        ("", False),
        ("#define __GLIBC__ 2\n#define __GLIBC_PREREQ(major, minor) 0\n", False),
        ("#define __GLIBC__ 2\n#define __GLIBC_PREREQ(major, minor) 1\n", True),
    ],
    ids=["another C library", "an older one", "GLIBC"],
)
def test_symbols_are_bound_for_newer_glibc_alone(macros, is_bound, tmp_path):
    (tmp_path / "link.h").write_text("#pragma once\n")
    (tmp_path / "dlfcn.h").write_text(f"#pragma once\n{macros}")
    (tmp_path / "pthread.h").write_text("#pragma once\n")
    header = Path(ag.get_include(), "ascend_grad", "glibc.h")
    command = [*compiler(), "-E", "-x", "c", "-nostdinc", "-U__GLIBC__", "-D__x86_64__", f"-I{tmp_path}", str(header)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("symver dlopen, dlopen@" in result.stdout) == is_bound
