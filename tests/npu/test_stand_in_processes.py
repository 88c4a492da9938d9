"""Test the test double in separate processes, over separate installations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in

A2 = "Ascend910B2"
#: Code that prints the statuses of the first two calls, and the number of devices.
COUNT = "acl.aclInit(None), count(), n.value"


def run(code: str, home: Path | None = None, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a new process, in which `acl` is a client of the test double.

    The code runs over the installation in `home`. Without a `home` the code runs over the single library, initialised
    and bound to device 0.
    """
    libraries = [stand_in.build_alone()] if home is None else sorted((home / "lib64").glob("lib[ano]*.so"))
    script = f"""
import ctypes, os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from acl_client import *
acl = Acl(*map(Path, {list(map(str, libraries))!r}))
if {home is None}:
    acl.check("aclInit", None)
    acl.check("aclrtSetDevice", 0)
{code}
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def test_report_of_a_process(tmp_path: Path) -> None:
    report = tmp_path / "report"
    run(
        "acl.malloc(64); print(acl.aclrtGetSocName(), acl.aclrtMalloc(None, 1, 0), acl.aclrtSetDevice(2))",
        CANN_STAND_IN_REPORT=str(report),
        CANN_STAND_IN_SOC="Ascend310P3",
        CANN_STAND_IN_DEVICES="3",
    )
    lines = report.read_text().splitlines()
    assert "device_allocations 1" in lines
    assert any(line.startswith("violation aclrtMalloc: NULL") for line in lines)


def test_settings_of_a_process() -> None:
    done = run(
        """
print(acl.aclrtGetSocName().decode(), acl.aclrtSetDevice(2), acl.aclrtSetDevice(3))
for size in (2000, 100, 100):
    try:
        acl.malloc(size)
    except StatusError as error:
        print(error.code)
""",
        CANN_STAND_IN_SOC="Ascend310P3",
        CANN_STAND_IN_DEVICES="3",
        CANN_STAND_IN_MEMORY="1000",
        CANN_STAND_IN_FAIL="aclrtMalloc:3:207018,aclrtFree:1:1",
    )
    assert done.stdout.split() == ["Ascend310P3", "0", "107001", "207001", "207018"]


def test_nothing_works_before_initialisation_or_in_a_child() -> None:
    done = run(
        """
left = ctypes.c_uint64()
print(acl.aclFinalizeReference(ctypes.byref(left)), acl.aclrtSetDevice(0), acl.aclFinalizeReference(ctypes.byref(left)))
acl.check("aclInit", None)
acl.check("aclrtSetDevice", 0)
stream = acl.stream()
pid = os.fork()
if pid == 0:
    os._exit(acl.aclrtSynchronizeStream(stream) == 507899)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert done.stdout.split() == ["0", "100001", "100037", "1"]


@pytest.mark.parametrize("call", ["aclFinalize()", "aclrtResetDevice(0)"])
def test_ending_the_device_for_everybody(call, tmp_path: Path) -> None:
    report = tmp_path / "report"
    run(f"acl.{call}", CANN_STAND_IN_REPORT=str(report))
    assert "for everybody in the process" in report.read_text()


@pytest.mark.parametrize(
    ("variant", "code", "expected"),
    [
        ("split", COUNT, "0 0 2"),
        ("aggregate", COUNT, "0 0 2"),
        ("train_infer", COUNT, "0 0 2"),
        ("link_time_stub", "acl.aclInit(None), count(), acl.aclnnSoftmax(None, 0, None, None)", "100039 100039 100039"),
        ("no_device", COUNT, "0 0 0"),
        ("no_driver", "acl.aclInit(None), count()", "0 107001"),
        ("device_lost", "acl.aclInit(None), count()", "0 207004"),
        ("init_fails", COUNT, "500000 0 2"),
        ("older", "*[hasattr(acl, f'acl{name}') for name in ('nnSoftmax', 'nnFusedLinearOnlineMaxSum')]", "True False"),
        ("older", "hasattr(acl, 'aclFinalizeReference'), hasattr(acl, 'aclrtCreateContext')", "False False"),
    ],
)
def test_installations(variant, code, expected) -> None:
    done = run(
        f"n = ctypes.c_uint32()\ndef count(): return acl.aclrtGetDeviceCount(ctypes.byref(n))\nprint({code})",
        stand_in.build(variant),
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("variant", "soc", "codes"),
    [
        ("no_kernel_path", A2, "561107 561107 561107"),
        ("no_kernel_package", A2, "561112 561112 561112"),
        ("no_kernels", A2, "561003 561003 561003"),
        ("before_9_2", A2, "0 0 0"),
        ("before_9_2", "Ascend950PR_9589", "0 0 561112"),
        ("split", "Ascend950PR_9589", "0 0 0"),
    ],
)
def test_installations_without_kernels(variant, soc, codes) -> None:
    """The first phase reports a missing kernel after all other checks."""
    done = run(
        """
acl.check("aclInit", None)
acl.check("aclrtSetDevice", 0)
x, mask, column = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2, 2), bool), np.zeros(3, np.float32)
def code(name, *arguments):
    return acl.prepare(name, *(acl.put(a) if isinstance(a, np.ndarray) else a for a in arguments))[0]
assert code("Softmax", x, 7, x) == 161002
print(code("Softmax", x, 0, x), code("ScaledMaskedSoftmax", x, mask, 1.0, False, x),
      code("FusedCrossEntropyLossWithMaxSum", *[column] * 3, 0.0, None, None, None, column, None))
acl.clear()
""",
        stand_in.build(variant),
        CANN_STAND_IN_SOC=soc,
    )
    assert done.stdout.strip() == codes


def test_compiles_without_warnings() -> None:
    for variant in stand_in.VARIANTS:
        stand_in.build(variant)
    assert stand_in.warnings == []


def test_library_that_lacks_its_neighbour_does_not_load() -> None:
    """A library does not load without its dependency, in a new process that has not loaded the dependency before."""
    library = stand_in.build("split_without_math") / "lib64" / "libopapi_nn.so"
    program = f"import ctypes; ctypes.CDLL({str(library)!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "libopapi_math" in run.stderr


def test_host_that_touches_device_memory_crashes() -> None:
    for action in ("ctypes.string_at(p, 1)", "ctypes.memset(p, 0, 1)", "ctypes.string_at(stream, 1)"):
        done = run(f"p = acl.malloc(64); stream = acl.stream(); {action}", check=False)
        assert done.returncode == -signal.SIGSEGV, done.stderr
