"""Who computes: the argument, `use_backend`, the environment, the automatic choice, in this order."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from samples import ARRAYS, MASKED, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import _cpu, _openmp, _threads
from ascend_grad.arguments import MAX_THREADS
from ascend_grad.backends import REGISTRY
from ascend_grad.backends.ascend import runtime
from ascend_grad.backends.base import Unsupported

X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def no_choice_is_left(nothing_of_the_callers_is_changed):
    yield
    assert ag.explain("softmax", X).reason.startswith("automatic choice")


def chosen() -> str:
    return ag.explain("softmax", X).backend


@pytest.fixture
def computed_by(monkeypatch) -> list[str]:
    """The names of the backends but the CPU's that were called, in order."""
    names: list[str] = []
    for name, backend in REGISTRY.items():

        def run(call, num_threads, name=name, original=backend.run):
            names.append(name)
            return original(call, num_threads)

        monkeypatch.setattr(backend, "run", run)
    return names


# ---- use_backend -----------------------------------------------------------------------------------------------------


def test_use_backend_as_a_context_manager():
    assert chosen() == "cpu"
    with ag.use_backend("reference"):
        assert chosen() == "reference"
        with ag.use_backend("cpu"):
            assert chosen() == "cpu"
            with ag.use_backend("auto"):
                assert chosen() == "cpu"
        assert chosen() == "reference"
    assert chosen() == "cpu"


def test_use_backend_as_a_setter():
    def in_a_context_of_its_own():
        ag.use_backend("reference")
        assert chosen() == "reference"
        ag.use_backend("auto")
        assert chosen() == "cpu"
        with ag.use_backend("cpu"):
            ag.use_backend("reference")
            assert chosen() == "reference"
        assert ag.explain("softmax", X).reason == "use_backend; not npu: " + ag.backends()["npu"].reason

    contextvars.copy_context().run(in_a_context_of_its_own)


def test_use_backend_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), ag.use_backend("reference"):
        raise ZeroDivisionError
    assert chosen() == "cpu"


def test_a_choice_can_be_used_again():
    choice = ag.use_backend("reference")
    for _ in range(2):
        with choice:
            assert chosen() == "reference"
        assert chosen() == "cpu"


def test_use_backend_is_local_to_threads_and_contexts():
    seen = []
    with ag.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert contextvars.copy_context().run(chosen) == "reference"
    assert seen == ["cpu"]
    context = contextvars.copy_context()
    context.run(ag.use_backend, "reference")
    assert context.run(chosen) == "reference"
    assert chosen() == "cpu"


def test_one_choice_in_two_threads():
    """Each goes back to what its own thread had, though they enter and leave in the same order."""
    choice = contextvars.copy_context().run(ag.use_backend, "reference")
    first_entered, second_entered, first_left = (threading.Event() for _ in range(3))

    def first() -> list[str]:
        ag.use_backend("auto")
        with choice:
            first_entered.set()
            assert second_entered.wait(30)
            seen = [chosen()]
        first_left.set()
        return [*seen, chosen()]

    def second() -> list[str]:
        ag.use_backend("reference")
        assert first_entered.wait(30)
        with choice:
            second_entered.set()
            assert first_left.wait(30)
            seen = [chosen()]
        return [*seen, chosen()]

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(first), pool.submit(second)]
        assert [call.result(60) for call in calls] == [["reference", "cpu"], ["reference", "reference"]]


def test_one_choice_in_many_tasks():
    choice = contextvars.copy_context().run(ag.use_backend, "reference")

    async def work(before: str, turns: int) -> list[str]:
        seen = []
        with ag.use_backend(before):
            for _ in range(3):
                with choice:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    seen.append(chosen())
                seen.append(chosen())
                await asyncio.sleep(0)
        return [*seen, chosen()]

    async def main():
        return await asyncio.gather(work("cpu", 1), work("reference", 3), work("auto", 2))

    for before, seen in zip(("cpu", "reference", "cpu"), asyncio.run(main()), strict=True):
        assert seen == ["reference", before] * 3 + ["cpu"]


def test_a_block_holds_in_the_tasks_that_it_starts():
    """A task has a copy of the context in which it was started: neither end of a block reaches across."""

    async def main():
        async def work():
            seen.append(chosen())
            await asyncio.sleep(0.01)
            seen.append(chosen())

        seen = []
        with ag.use_backend("reference"):
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
        assert chosen() == "cpu"
        await task
        assert seen == ["reference", "reference"]

    asyncio.run(main())


def test_a_choice_within_itself():
    with ag.use_backend("reference") as choice:
        with ag.use_backend("cpu"):
            with choice:
                with choice:
                    assert chosen() == "reference"
                assert chosen() == "reference"
            assert chosen() == "cpu"
        assert chosen() == "reference"
    assert chosen() == "cpu"


def test_leaving_what_was_not_entered():
    def in_a_context_of_its_own():
        choice = ag.use_backend("reference")
        message = r"use_backend\('reference'\): there is no block of it to leave in this thread or task"
        with pytest.raises(RuntimeError, match=message):
            choice.__exit__(None, None, None)
        assert chosen() == "reference"  # as a function it lasts
        with choice:
            pass
        with pytest.raises(RuntimeError, match=message):
            choice.__exit__(None, None, None)
        with choice:
            with pytest.raises(RuntimeError, match=message):
                contextvars.Context().run(choice.__exit__, None, None, None)
            assert chosen() == "reference"
        assert chosen() == "cpu"

    contextvars.Context().run(in_a_context_of_its_own)


def test_blocks_that_end_in_another_order():
    """As those of generators do, which run in the context of whoever asks for the next value."""

    def generator(name):
        with ag.use_backend(name):
            while True:
                yield chosen()

    first, second = generator("reference"), generator("cpu")
    assert (next(first), next(second), next(first)) == ("reference", "cpu", "cpu")
    first.close()
    assert chosen() == "cpu"
    assert ag.explain("softmax", X).reason == "asked for by use_backend"
    second.close()
    assert ag.explain("softmax", X).reason.startswith("automatic choice")


def test_choices_leave_nothing_behind():
    """However often a choice is made: no chain of all earlier ones."""
    counts = []

    def in_a_context_of_its_own():
        made = []
        for _ in range(5):
            made.append(weakref.ref(ag.use_backend("reference")))
            with ag.use_backend("cpu"):
                pass
        gc.collect()
        counts.append(sum(each() is not None for each in made))

    contextvars.copy_context().run(in_a_context_of_its_own)
    assert counts == [0]


@pytest.mark.parametrize("name", ["gpu", "", None, 3, ["cpu"]], ids=repr)
def test_use_backend_refuses_other_names(name):
    with pytest.raises(ag.ParamInvalidError, match="backend: expected one of auto, cpu, npu, reference, got "):
        ag.use_backend(name)


def test_the_choice_computes(operator, computed_by):
    """The CPU must not answer in the place of another backend."""
    problem = random_problem(operator, (1, 2, 3, 4), np.float32)
    function = getattr(ag, operator)

    def call(**settings):
        computed_by.clear()
        function(*problem.arrays, **problem.settings, **settings)
        return computed_by or ["cpu"]  # whose compiled function is called directly

    assert call() == ["cpu"]
    assert call(backend="reference") == ["reference"]
    with ag.use_backend("reference"):
        assert call() == ["reference"]
        assert call(out=np.empty(problem.shape, np.float32)) == ["reference"]
        assert call(backend="cpu") == ["cpu"]
        assert call(backend="auto") == ["cpu"]
    with ag.use_backend("npu"):
        assert call(backend="cpu") == ["cpu"]
        with pytest.raises(ag.BackendUnavailableError):
            call()


# ---- backends that cannot --------------------------------------------------------------------------------------------


def test_every_call_is_logged(operator, caplog):
    problem = random_problem(operator, (2, 3, 4, 5) if operator in MASKED else (4, 5), np.float32)
    expected = getattr(ag, operator)(*problem.arrays, **problem.settings)
    with caplog.at_level(logging.DEBUG, "ascend_grad"):
        result = getattr(ag, operator)(*problem.arrays, **problem.settings)
    assert_identical(result, expected)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ascend_grad", logging.DEBUG)
    message = record.getMessage()
    assert message.startswith(f"{operator} of float32{problem.arrays[0].shape}")
    assert ": cpu, automatic choice; not npu: " in message


def test_logging_follows_the_levels(caplog):
    """Whichever logger they are set for."""
    logger, root = logging.getLogger("ascend_grad"), logging.getLogger()

    def is_logged() -> bool:
        caplog.clear()
        ag.softmax(X)
        return bool(caplog.records)

    before = root.level
    try:
        assert not is_logged()
        for chosen_logger in (logger, root):
            for _ in range(2):
                chosen_logger.setLevel(logging.DEBUG)
                assert is_logged()
                logging.disable(logging.DEBUG)
                assert not is_logged()
                logging.disable(logging.NOTSET)
                assert is_logged()
                chosen_logger.setLevel(logging.INFO)
                assert not is_logged()
            logger.setLevel(logging.NOTSET)
    finally:
        root.setLevel(before)
        logger.setLevel(logging.NOTSET)
        logging.disable(logging.NOTSET)


def test_what_is_asked_for_but_unavailable_is_an_error(operator):
    problem = random_problem(operator, (1, 2, 3, 4), np.float32)
    reason = ag.backends()["npu"].reason
    assert not ag.backends()["npu"].usable
    for function, arguments in ((getattr(ag, operator), ()), (ag.explain, (operator,))):
        with pytest.raises(ag.BackendUnavailableError) as info:
            function(*arguments, *problem.arrays, **problem.settings, backend="npu")
        assert info.value.operator == operator
        assert info.value.code is None
        assert str(info.value) == f"{operator}: backend 'npu' (the backend argument) cannot compute this call: {reason}"


def test_a_bad_call_is_bad_on_an_unavailable_backend_too():
    with pytest.raises(ag.ParamInvalidError, match="dim"):
        ag.softmax(X, 2, backend="npu")


def test_the_first_backend_that_takes_the_call_is_chosen(monkeypatch):
    npu = REGISTRY["npu"]
    monkeypatch.setitem(runtime.found, "state", runtime.State((True, "pretended")))
    refusal = Unsupported("rank 1 only", ag.ParamInvalidError("rank 1 only", operator="softmax"))
    monkeypatch.setattr(npu, "unsupported_reason", lambda call: None if call.arrays[0].ndim == 1 else refusal)
    monkeypatch.setattr(npu, "run", lambda call, num_threads: "from the device")
    assert ag.explain("softmax", X[0]) == ("npu", "automatic choice")
    assert ag.explain("softmax", X) == ("cpu", "automatic choice; not npu: rank 1 only")
    assert ag.softmax(X[0]) == "from the device"
    assert_identical(ag.softmax(X), ag.softmax(X, backend="cpu"))
    with pytest.raises(ag.ParamInvalidError, match="rank 1 only"):
        ag.softmax(X, backend="npu")


# ---- questions -------------------------------------------------------------------------------------------------------


def test_explain(operator):
    problem = random_problem(operator, (1, 2, 3, 4), np.float32)

    def explain(**settings):
        return ag.explain(operator, *problem.arrays, **problem.settings, **settings)

    assert explain()._fields == ("backend", "reason")
    assert explain() == ("cpu", f"automatic choice; not npu: {ag.backends()['npu'].reason}")
    assert explain(backend="cpu") == ("cpu", "asked for by the backend argument")
    with ag.use_backend("reference"):
        assert explain() == ("reference", "asked for by use_backend")
        assert explain(backend="auto").backend == "cpu"


def test_questions_take_arguments_as_calls_do():
    assert ag.explain("softmax", input=X, dim=0).backend == "cpu"
    for question in (ag.explain, ag.workspace_size):
        with pytest.raises(TypeError, match="missing a required argument"):
            question("softmax")
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            question("softmax", X, axis=0)
        for name in ("softmin", None, ["softmax"]):
            with pytest.raises(ag.ParamInvalidError, match="op_name: expected one of softmax_backward, "):
                question(name, X)


def test_questions_compute_nothing(operator, computed_by):
    problem = random_problem(operator, (1, 2, 3, 4), np.float32)
    out = np.full(problem.shape, 7, np.float32)
    for question in (ag.explain, ag.workspace_size):
        question(operator, *problem.arrays, **problem.settings, out=out)
    assert not computed_by
    assert np.all(out == 7)


def test_workspace_size():
    x = np.zeros((256, 256), np.float32)
    size = ag.workspace_size("softmax", x)
    assert isinstance(size, int)
    assert size >= 0
    assert ag.workspace_size("softmax", x, num_threads=4) >= ag.workspace_size("softmax", x, num_threads=1)
    # A result that overlaps an input other than element for element is computed aside.
    aside = ag.workspace_size("softmax", x, out=x.T) - size
    assert aside == x.nbytes
    assert ag.workspace_size("softmax", x, out=x) == size
    # Values do not matter, nor that the memory could not be had.
    assert ag.workspace_size("softmax", np.broadcast_to(np.float32(0), (2**40, 2))) > 0
    assert ag.workspace_size("softmax", x[:0]) == 0


def test_backends():
    status = ag.backends()
    assert list(status) == ["npu", "cpu", "reference"]
    assert all(entry._fields == ("usable", "reason") for entry in status.values())
    assert status["cpu"].usable
    assert status["reference"].usable
    assert _cpu.variant() in status["cpu"].reason


def test_show_config(capsys):
    config = ag.show_config(mode="dict")
    assert capsys.readouterr().out == ""
    assert config["version"]["ascend_grad"] == ag.__version__
    assert config["cpu"] == {"variant": _cpu.variant(), "supported": list(_cpu.supported_variants())}
    assert config["threads"] == ag.get_num_threads()
    assert ("no OpenMP" in config["openmp"]) == (not _openmp.VERSION)
    assert config["backends"]["npu"] == ag.backends()["npu"]._asdict()
    assert ag.show_config() is None
    printed = capsys.readouterr().out
    assert all(text in printed for text in (ag.__version__, _cpu.variant(), config["openmp"], "npu"))
    with pytest.raises(ag.ParamInvalidError, match="mode: expected 'stdout' or 'dict', got str 'yaml'"):
        ag.show_config(mode="yaml")


def test_forced_variants(forced):
    for name in _cpu.supported_variants():
        forced(name)
        assert _cpu.variant() == name
        assert ag.show_config(mode="dict")["cpu"]["variant"] == name
    with pytest.raises(ValueError, match="expected one of"):
        forced("mmx")
    unsupported = set(_cpu.VARIANTS) - set(_cpu.supported_variants())
    for name in unsupported:
        with pytest.raises(ValueError, match="expected one of"):
            forced(name)


# ---- the environment -------------------------------------------------------------------------------------------------


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
            ("ASCEND_GRAD_CPU", name, f"this machine supports {', '.join(_cpu.supported_variants())}, got '{name}'")
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
        assert ag.show_config(mode="dict")["environment"] == {{"ASCEND_GRAD_CPU": "{variant}"}}
        ag.softmax([1.0, 2.0])
    """
    run_script(script, ASCEND_GRAD_CPU=variant)


def test_empty_variables_are_silent(run_script):
    names = ("BACKEND", "CPU", "NUM_THREADS", "DEVICE")
    script = "import ascend_grad as ag; assert ag.show_config(mode='dict')['environment'] == {}"
    run_script(script, **{f"ASCEND_GRAD_{name}": "" for name in names})


def test_the_environments_backend(run_script):
    script = """
        import ascend_grad as ag
        assert ag.explain("softmax", [1.0]) == ("reference", "asked for by ASCEND_GRAD_BACKEND")
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


# ---- import ----------------------------------------------------------------------------------------------------------


def test_import_is_light(run_script):
    """No large packages, no threads, no device, nothing printed, nothing left in the way of other modules."""
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


def test_use_backend_entered_late_or_elsewhere():
    """The block uses the object's choice, whatever was chosen since or in whichever thread it is entered."""
    with ag.use_backend("auto"):
        late = ag.use_backend("reference")
        ag.use_backend("cpu")
        with late:
            assert ag.explain("softmax", [1.0]).backend == "reference"
        assert ag.explain("softmax", [1.0], num_threads=1).reason == "asked for by use_backend"
        assert ag.explain("softmax", [1.0]).backend == "cpu"
        seen = []

        def elsewhere():
            with late:
                seen.append(ag.explain("softmax", [1.0]).backend)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == ["reference"]


def test_workspace_size_raises_what_the_call_would():
    with pytest.raises(ag.BackendUnavailableError):
        ag.workspace_size("softmax", [1.0], backend="npu")


def test_quota_of_control_groups(tmp_path):
    """Version 1 and 2, the tightest of all groups from the root down; rounded up to whole cores."""
    quota = _threads._quota_of_control_group
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    inner = tmp_path / "two" / "outer" / "inner"
    inner.mkdir(parents=True)
    assert quota(str(tmp_path / "two"), str(membership)) == 1 << 20
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    assert quota(str(tmp_path / "two"), str(membership)) == 3
    membership.write_text("5:memory:/x\n3:cpu,cpuacct:/y\n")
    group = tmp_path / "one" / "cpu,cpuacct" / "y"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert quota(str(tmp_path / "one"), str(membership)) == 1 << 20
    (group / "cpu.cfs_quota_us").write_text("50000")
    assert quota(str(tmp_path / "one"), str(membership)) == 1
    assert quota(str(tmp_path), str(tmp_path / "missing")) == 1 << 20


def test_sources_without_compiled_modules_say_so(run_script, tmp_path):
    """Python takes the sources for the package where they lie in the folder that it starts in."""
    sources = Path(ag.__file__).parent
    copy = tmp_path / "ascend_grad"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "bench", "include"))
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ascend_grad"
    done = run_script(script, check=False)
    assert "the compiled modules of ascend_grad cannot be imported from" in done.stderr
    assert done.returncode == 1
