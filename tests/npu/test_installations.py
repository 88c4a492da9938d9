"""Test whole and partial installations of a toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_in import FUSED, LOSSES, VARIANTS, build

PROBE = """
    import logging, sys
    import numpy as np
    import ascend_grad as ag
    with open("/proc/self/maps") as file:
        maps = file.read()
    assert "libascendcl" not in maps and "cann_stand_in" not in maps, "opened at import"
    x = np.zeros(4, np.float32)
    for _ in range(3):
        ag.softmax(x)
    print(ag.explain("softmax", x).backend)
    status = ag.backends()["npu"]
    print(status.usable, status.reason)
    try:
        ag.softmax(x, backend="npu")
    except ag.AscendGradError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("name", ["split", "aggregate", "train_infer", "split_without_math"])
def test_installations(name, run_script):
    result = run_script(PROBE, ASCEND_HOME_PATH=str(build(name)))
    lacking = "; this toolkit lacks " + ", ".join(f"aclnn{each}" for each in LOSSES) if name == "train_infer" else ""
    assert result.stdout == f"npu\nTrue 2 devices, Ascend910B2{lacking}\n"
    assert result.stderr == ""
    elsewhere = run_script(PROBE, ASCEND_HOME_PATH="/nowhere", ASCEND_TOOLKIT_HOME=str(build(name)))
    assert elsewhere.stdout == result.stdout
    by_the_loader = run_script(PROBE, LD_LIBRARY_PATH=str(build(name) / "lib64"))
    assert by_the_loader.stdout == result.stdout


@pytest.mark.parametrize(
    ("name", "reason", "warned"),
    [
        ("link_time_stub", "the runtime library is a stub to link against, not a runtime", False),
        ("no_device", "the runtime found no device", False),
        ("no_driver", "aclrtGetDeviceCount failed", True),
        ("device_lost", "aclrtGetDeviceCount failed", False),
        ("init_fails", "aclInit failed: 500000 ACL_ERROR_INTERNAL_ERROR, ", True),
        ("without_copies", "the runtime library lacks aclrtMemcpyAsync", True),
        ("without_operators", "no operator library: none of libopapi_math.so, libopapi_nn.so, libopapi.so, ", True),
    ],
)
def test_installations_without_a_usable_device(name, reason, warned, run_script):
    """The CPU computes without a usable device. A broken installation causes one warning, an absent device none."""
    result = run_script(PROBE, ASCEND_HOME_PATH=str(build(name)))
    first, status, error = result.stdout.splitlines()
    assert first == "cpu"
    assert status.startswith(f"False {reason}")
    assert error == "BackendUnavailableError"
    if warned:
        assert result.stderr.startswith(f"the Ascend NPU cannot be used: {reason}")
        assert result.stderr.count("\n") == 1
    else:
        assert result.stderr == ""


def test_no_installation(run_script):
    result = run_script(
        PROBE + "\n    print(ag.explain('softmax', x).details)",
        ASCEND_HOME_PATH="",
        ASCEND_TOOLKIT_HOME="",
        LD_LIBRARY_PATH="",
    )
    assert result.stdout.startswith("cpu\nFalse no Ascend NPU found\n")
    assert "none of libascendcl.so, libacl_rt.so in $ASCEND_HOME" in result.stdout
    assert result.stderr == ""


def test_a_library_that_does_not_load(run_script, tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").write_text("not a library")
    result = run_script(PROBE, ASCEND_HOME_PATH=str(tmp_path))
    assert result.stdout.startswith(f"cpu\nFalse {tmp_path}/lib64/libascendcl.so does not load: ")
    assert result.stderr.count("the Ascend NPU cannot be used") == 1


def test_operators_that_an_older_toolkit_lacks(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        x, w, t = np.ones((2, 3), np.float16), np.ones((5, 3), np.float16), np.zeros(2, int)
        print(ag.backends()["npu"].reason)
        print(ag.explain("softmax", x).backend, ag.softmax(x[:, :2]).tolist())
        print(*ag.explain("fused_linear_online_max_sum", x, w, t, 0, 5))
        print(*ag.explain("linear_cross_entropy", x, w, t))
        ag.linear_cross_entropy(x, w, t)
        try:
            ag.linear_cross_entropy(x, w, t, backend="npu")
        except ag.BackendUnavailableError as error:
            print(error)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("older")))
    lacks = "this toolkit's operator library lacks aclnnFusedLinearOnlineMaxSum"
    blocks = "for blocks of logits: this toolkit's operator library lacks aclnnCrossEntropyLoss"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("2 devices, Ascend910B2; this toolkit lacks aclnnFusedLinearCrossEntropyLossGrad, ")
    assert lines[1:] == [
        "npu [[0.5, 0.5], [0.5, 0.5]]",
        f"cpu automatic choice; not npu: {lacks}",
        f"cpu automatic choice; not npu: {lacks}; {blocks}",
        f"linear_cross_entropy: {lacks}; {blocks}",
    ]


def verbose_info(run_script, **environment: str) -> list[str]:
    script = "from ascend_grad.cli.main import main; main(['info', '--verbose'])"
    lines = run_script(script, **environment).stdout.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("backend       npu: "))
    last = next(place for place, line in enumerate(lines) if line.startswith("backend       cpu: "))
    return [line.strip() for line in lines[first + 1 : last]]


def test_info_tells_what_was_opened(run_script):
    folder = build("older") / "lib64"
    libraries, found, *lacking = verbose_info(run_script, ASCEND_HOME_PATH=str(build("older")))
    assert libraries == "libraries: " + ", ".join(
        str(folder / name) for name in ("libascendcl.so", "libnnopbase.so", "libopapi.so")
    )
    assert found.startswith("operators found: aclnnSoftmaxBackward, ")
    assert all(line.startswith("operator missing: this toolkit's operator library lacks aclnn") for line in lacking)
    missing = [line.split()[-1] for line in lacking]
    assert set(missing) == {f"aclnn{name}" for name in (*FUSED, *LOSSES)}
    assert not set(missing) & set(found.split(": ")[1].split(", "))


def test_info_names_every_family_and_a_missing_kernel(run_script):
    script = """
        import numpy as np, ascend_grad as ag
        ag.softmax(np.zeros(4, np.float32))
        print(ag.backends()["npu"].details)
    """
    lines = run_script(script, ASCEND_HOME_PATH=str(build("no_kernels"))).stdout.splitlines()
    assert {path.rpartition("/")[2] for path in lines[0].split(", ")[2:]} == {"libopapi_math.so", "libopapi_nn.so"}
    assert lines[2].startswith("operator missing: this toolkit has no usable kernel of aclnnSoftmax (561003 ")


@pytest.mark.parametrize("name", ["link_time_stub", "no_device", "init_fails"])
def test_info_tells_what_was_opened_without_a_device(name, run_script):
    (libraries,) = verbose_info(run_script, ASCEND_HOME_PATH=str(build(name)))
    assert libraries.startswith(f"libraries: {build(name)}/lib64/libascendcl.so, ")


def test_somebody_else_has_initialised_the_runtime(run_script):
    script = """
        import ctypes, os, numpy as np, ascend_grad as ag
        runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
        assert runtime.aclInit(None) == 0
        print(ag.explain("softmax", np.zeros(3, np.float32)).backend, ag.softmax(np.zeros(2, np.float32)))
    """
    assert run_script(script, ASCEND_HOME_PATH=str(build("split"))).stdout == "npu [0.5 0.5]\n"


def test_every_variant_is_used():
    tests = [path for path in Path(__file__).parent.glob("test_*.py") if "stand_in" not in path.name]
    text = "".join(path.read_text() for path in tests)
    assert all(f'"{name}"' in text for name in VARIANTS)


def test_a_broken_library_on_the_loaders_path_is_a_warning(run_script, tmp_path):
    (tmp_path / "libascendcl.so").write_text("garbage")
    script = """
        import logging
        logging.basicConfig(level=logging.WARNING)
        import ascend_grad as ag
        print(ag.backends()["npu"].reason)
    """
    run = run_script(script, LD_LIBRARY_PATH=str(tmp_path), ASCEND_HOME_PATH="/nowhere", ASCEND_TOOLKIT_HOME="/nowhere")
    assert "does not load" in run.stdout
    assert "WARNING" in run.stderr
