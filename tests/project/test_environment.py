"""Test environment variables, limits of the machine, and the effects of an import."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from samples import ARRAYS, MASKED

import ascend_grad as ag
from ascend_grad import _cpu, _threads
from ascend_grad.arguments import MAX_THREADS

SUPPORTED = f"expected one of {', '.join(_cpu.supported_variants())} on this machine"


@pytest.mark.parametrize(
    ("variable", "value", "choices"),
    [
        ("ASCEND_GRAD_BACKEND", "gpu", "expected one of auto, cpu, npu, reference, got 'gpu'"),
        ("ASCEND_GRAD_BACKEND", "CPU", "expected one of auto, cpu, npu, reference, got 'CPU'"),
        ("ASCEND_GRAD_CPU", "sse9", f"expected one of {', '.join(_cpu.VARIANTS)}, got 'sse9'"),
        ("ASCEND_GRAD_NUM_THREADS", "0", f"expected an integer in [1, {MAX_THREADS}], got '0'"),
        ("ASCEND_GRAD_NUM_THREADS", "many", f"expected an integer in [1, {MAX_THREADS}], got 'many'"),
        ("ASCEND_GRAD_NUM_THREADS", "1.5", f"expected an integer in [1, {MAX_THREADS}], got '1.5'"),
        ("ASCEND_GRAD_NUM_THREADS", "1" * 5000, f"expected an integer in [1, {MAX_THREADS}], got '111"),
        ("ASCEND_GRAD_DEVICE", "-1", "expected an integer in [0, 2147483647], got '-1'"),
        *(
            ("ASCEND_GRAD_CPU", name, f"{SUPPORTED}, got '{name}': {_cpu.unsupported_reason(name)}")
            for name in _cpu.VARIANTS
            if name not in _cpu.supported_variants()
        ),
    ],
)
def test_wrong_values_are_said_at_import(variable, value, choices, run_script):
    result = run_script("import ascend_grad", check=False, **{variable: value})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"ValueError: {variable}: {choices}")


@pytest.mark.parametrize("variant", _cpu.supported_variants())
def test_the_environments_variant(variant, run_script):
    script = f"""
        import ascend_grad as ag
        assert ag.show_config(mode="dict")["cpu"]["variant"] == "{variant}"
        assert ag.show_config(mode="dict")["environment"]["ASCEND_GRAD_CPU"] == "{variant}"
        ag.softmax([1.0, 2.0])
    """
    run_script(script, ASCEND_GRAD_CPU=variant)


def test_empty_variables_are_silent(run_script):
    names = ("BACKEND", "CPU", "NUM_THREADS", "DEVICE")
    script = "import ascend_grad as ag; assert 'ASCEND_GRAD' not in str(ag.show_config(mode='dict')['environment'])"
    run_script(script, **{f"ASCEND_GRAD_{name}": "" for name in names})


def test_the_environments_toolkit(run_script):
    """The configuration names the variables by which a toolkit is found, if they are set."""
    script = """
        import ascend_grad as ag
        environment = ag.show_config(mode="dict")["environment"]
        print(*(environment.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH")))
    """
    done = run_script(script, ASCEND_HOME_PATH="/nowhere", ASCEND_TOOLKIT_HOME="", LD_LIBRARY_PATH="/nothing")
    assert done.stdout == "/nowhere None /nothing\n"


def test_the_environments_backend(run_script):
    script = """
        import ascend_grad as ag
        assert ag.explain("softmax", [1.0]) == ("reference", "requested by ASCEND_GRAD_BACKEND")
        assert ag.explain("softmax", [1.0], backend="cpu").backend == "cpu"
        with ag.use_backend("cpu"):
            assert ag.explain("softmax", [1.0]).backend == "cpu"
        with ag.use_backend("auto"):
            assert ag.explain("softmax", [1.0]).backend == "cpu"
    """
    run_script(script, ASCEND_GRAD_BACKEND="reference")


def test_a_missing_device_is_said_at_the_first_call(run_script):
    script = """
        import numpy as np
        import ascend_grad as ag
        assert not ag.backends()["npu"].usable
        for _ in range(2):
            try:
                ag.softmax(np.zeros(3))
            except ag.BackendUnavailableError as error:
                assert "'npu' (ASCEND_GRAD_BACKEND)" in str(error), error
            else:
                raise SystemExit("no error")
        assert ag.softmax(np.zeros(2), backend="cpu").sum() == 1
        with ag.use_backend("auto"):
            ag.softmax(np.zeros(3))
    """
    run_script(script, ASCEND_GRAD_BACKEND="npu")


def test_quota_of_control_groups(tmp_path):
    """The quota of control groups, of version 1 or 2, is the smallest quota from the root down, rounded up to cores."""
    quota = _threads._quota_of_control_group
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    inner = tmp_path / "two" / "outer" / "inner"
    inner.mkdir(parents=True)
    assert quota(bytes(tmp_path / "two"), bytes(membership)) == 1 << 20
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    assert quota(bytes(tmp_path / "two"), bytes(membership)) == 3
    membership.write_text("5:memory:/x\n3:cpu,cpuacct:/y\n")
    group = tmp_path / "one" / "cpu,cpuacct" / "y"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert quota(bytes(tmp_path / "one"), bytes(membership)) == 1 << 20
    (group / "cpu.cfs_quota_us").write_text("50000")
    assert quota(bytes(tmp_path / "one"), bytes(membership)) == 1
    assert quota(bytes(tmp_path), bytes(tmp_path / "missing")) == 1 << 20
    (group / "cpu.cfs_period_us").write_text("0")
    assert quota(bytes(tmp_path / "one"), bytes(membership)) == 1 << 20
    membership.write_text("no group\n\n7:\n")
    assert quota(bytes(tmp_path), bytes(membership)) == 1 << 20


def test_names_of_control_groups_that_are_no_text(tmp_path):
    quota = _threads._quota_of_control_group
    name = b"/job \xff\xfe:\xe9"
    (tmp_path / "membership").write_bytes(b"0::" + name + b"\n")
    os.mkdir(bytes(tmp_path) + name)
    Path(os.fsdecode(bytes(tmp_path) + name), "cpu.max").write_text("200000 100000\n")
    assert quota(bytes(tmp_path), bytes(tmp_path / "membership")) == 2


def test_import_is_light(run_script):
    """An import loads no large package and no device library, starts no thread, opens no file and prints nothing."""
    script = """
        import os, sys
        import numpy, ml_dtypes
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        before = set(sys.modules)
        import ascend_grad as ag
        assert len(os.listdir("/proc/self/task")) == threads
        assert len(os.listdir("/proc/self/fd")) == files
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        heavy = {"scipy", "matplotlib", "torch", "jax", "tqdm", "pandas", "asyncio", "multiprocessing", "argparse"}
        assert not new & heavy, new & heavy
        with open("/proc/self/maps") as maps:
            assert "libascend" not in maps.read().lower().replace("libascend_grad", "")
        ag.softmax(numpy.zeros(3))
        ag.backends()
        ag.show_config(mode="dict")
        assert len(os.listdir("/proc/self/task")) == threads
        assert not set(sys.modules) & (heavy - before)
    """
    result = run_script(script)
    assert (result.stdout, result.stderr) == ("", "")


def test_public_names():
    assert len(set(ag.__all__)) == len(ag.__all__)
    for name in ag.__all__:
        assert getattr(ag, name) is not None
        if callable(getattr(ag, name)):
            assert getattr(ag, name).__doc__
    assert set(ARRAYS) | set(MASKED) <= set(ag.__all__)


def test_sources_without_compiled_modules_say_so(run_script, tmp_path):
    """Sources without compiled modules fail to import with an explanation.

    Python takes sources for the package if they lie in the folder in which it starts.
    """
    sources = Path(ag.__file__).parent
    copy = tmp_path / "ascend_grad"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "bench", "include"))
    script = f"""
        import sys
        from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]  # an editable installation adds its own
        sys.path.insert(0, {str(tmp_path)!r})
        import ascend_grad
    """
    done = run_script(script, check=False)
    assert "the compiled modules of ascend_grad cannot be imported from" in done.stderr
    assert done.returncode == 1
