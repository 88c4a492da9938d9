"""Define the fixtures: all backends, all CPU variants of this machine, and the NPU backend over a test double."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import device_limits
import hypothesis
import linear_oracles
import numpy as np
import oracles
import pytest
import torch_npu_real
from broken import copy_of_the_package
from linear_samples import LINEAR, LinearProblem
from samples import DTYPES, OPERATORS, Problem
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import _cpu, npu
from ascend_grad.backends import REGISTRY
from ascend_grad.backends.ascend import backend as npu_backend
from ascend_grad.backends.ascend import runtime
from ascend_grad.operators import table

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

if torch_npu_real.IS_INSTALLED:
    torch_npu_real.load()  # torch_npu is loaded once, before anything else imports torch

VARIANTS = tuple(_cpu.supported_variants())
ENGINES = (*VARIANTS, "reference", "npu")

largest_errors: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)


#: Paths of tests that need an optional package. If the package is not installed, they are not collected.
ABOUT_EVERY_DOOR = ("tests/project/test_help.py",)
ABOUT_ZARR = (
    "tests/cli/test_apply_zarr.py",
    "tests/cli/test_apply_zarr_losses.py",
    "tests/cli/test_apply_zarr_refused.py",
    "tests/cli/test_apply_zarr_runs.py",
    "tests/cli/test_score_zarr.py",
    "tests/support/zarr_files.py",
    "ascend_grad/cli/apply_zarr.py",
    "ascend_grad/cli/score_zarr.py",
    "ascend_grad/cli/zarr_results.py",
)
ABOUT_PACKAGES = {
    "torch": (
        "tests/programs/test_fsdp.py",
        "tests/torch",
        "tests/arrays/test_torch.py",
        "tests/parallel/test_hccl.py",
        "tests/parallel/test_torch.py",
        "tests/programs/test_vocab_parallel_options.py",
        "tests/support/compat_problems.py",
        "tests/support/hccl_fork.py",
        "tests/support/hccl_ranks.py",
        "tests/support/hccl_stand_in.py",
        "tests/support/npu_tensors.py",
        "tests/support/tensor_ranks.py",
        "tests/support/loss_formulas.py",
        "tests/support/torch_cases.py",
        "tests/support/torch_npu_stand_in.py",
        "tests/support/torch_oracles.py",
        "ascend_grad/torch",
        "ascend_grad/parallel/process_group.py",
        "docs/torch.md",
        *ABOUT_EVERY_DOOR,
    ),
    "sklearn": (
        "tests/torch/test_import_last.py",
        "tests/fit/test_benchmark.py",
        "tests/fit/test_softmax_regression.py",
        "ascend_grad/sklearn.py",
        "docs/fitting.md",
    ),
    "lightgbm": ("tests/fit/test_lightgbm.py", "docs/fitting.md"),
    "xgboost": ("tests/fit/test_xgboost.py", "docs/fitting.md"),
    "jax": (
        "tests/torch/test_import_last.py",
        "tests/jax",
        "tests/arrays/test_jax.py",
        "tests/programs/test_shard_map.py",
        "tests/support/mesh_checks.py",
        "ascend_grad/jax",
        "docs/jax.md",
        *ABOUT_EVERY_DOOR,
    ),
    "dask": (
        "tests/dask",
        "tests/support/dask_chunks.py",
        "ascend_grad/dask",
        "docs/dask.md",
        *ABOUT_EVERY_DOOR,
        *ABOUT_ZARR,
    ),
    "zarr": ABOUT_ZARR,
    "torch_npu": ("tests/torch/test_npu_real.py", "tests/torch/test_npu_real_losses.py"),
    "PyInstaller": ("tests/programs/test_frozen.py",),
    "mypy": ("tests/programs/test_types.py",),
    "mpi4py": ("tests/parallel/test_mpi.py", "ascend_grad/parallel/mpi.py"),
}


#: Tests of the test double of torch_npu, which is used if torch_npu is not installed.
ABOUT_THE_DOUBLE = ("tests/torch/test_npu_double.py", "tests/torch/test_npu_breaks.py")


class Without:
    """Keep pytest from collecting tests from these paths."""

    def __init__(self, paths: Sequence[str]):
        self.paths = paths

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if any(collection_path.match(path) for path in self.paths) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # torch gives this warning about its own rules of forward mode, in 2.14 as a FutureWarning.
    for category in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore:.torch.jit.script. is deprecated:{category}")
    for package, paths in ABOUT_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            config.pluginmanager.register(Without(paths))
    if torch_npu_real.IS_INSTALLED:
        config.pluginmanager.register(Without(ABOUT_THE_DOUBLE))
        # torch_npu gives this warning once per process, when it copies a tensor that is not contiguous.
        config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")


class RefusedAsExpectedError(Exception):
    """End a test whose call the device refused with the code of one of its limits, as nothing remains to be tested."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    try:
        return (yield)
    except RefusedAsExpectedError:
        return True


def pytest_terminal_summary(terminalreporter) -> None:
    if not largest_errors:
        return
    terminalreporter.section("largest error before the rounding to 16 bits, in units of the bound")
    names = [name for name in ENGINES if any(name in row for row in largest_errors.values())]
    terminalreporter.write_line(f"{'':62}" + "".join(f"{name:>13}" for name in names))
    for (operator, dtype), row in sorted(largest_errors.items()):
        cells = "".join(f"{row[name]:13.3f}" if name in row else " " * 13 for name in names)
        terminalreporter.write_line(f"{operator:52}{dtype:10}{cells}")


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_collected() -> None:
    """Exclude objects that exist before the tests of a file, such as all collected tests, from garbage collections.

    Each collection would otherwise visit all of these objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_of_the_callers_is_changed() -> Iterator[None]:
    """Check that a test leaves NumPy's error handling, the number of threads and the CPU variant unchanged."""
    before = np.geterr(), ag.get_num_threads(), _cpu.variant()
    yield
    assert (np.geterr(), ag.get_num_threads(), _cpu.variant()) == before


@dataclass(frozen=True)
class Engine:
    """Compute in one way: by the reference, the CPU backend with one variant of its kernels, or the NPU backend."""

    name: str

    @property
    def backend(self) -> str:
        return self.name if self.name in ("reference", "npu") else "cpu"

    def over(self, sizes: Sequence, check: Callable[[Any], None]) -> None:
        """Check all sizes on the CPU's kernels, and every fifth size on other engines.

        The sizes lie around the edges of the kernels' vectors, tiles and blocks. If the device refuses a size, the
        remaining sizes are still checked.
        """
        for size in sizes if self.backend == "cpu" else sizes[::5]:
            with contextlib.suppress(RefusedAsExpectedError):
                check(size)

    def __call__(self, problem: Problem, **settings) -> np.ndarray:
        return self._call(problem, *problem.arrays, **problem.settings, **settings)

    def _call(self, problem: Problem | LinearProblem, *args, **kwargs):
        code = device_limits.code_of(problem) if self.backend == "npu" else None
        return self._run(getattr(ag, problem.operator), code, *args, **kwargs)

    def call(self, operator: str, *args, **kwargs):
        """Call a public function with arguments that are not a problem. The device's limits also apply to them."""
        function = getattr(ag, operator)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        code = device_limits.code(operator, bound.arguments) if self.backend == "npu" else None
        return self._run(function, code, *args, **kwargs)

    def _run(self, function: Callable, code: int | None, *args, **kwargs):
        """Return the result. If a code is given, check that the device refuses the call with it, and end the test."""
        if code is None:
            return function(*args, **kwargs, backend=self.backend)
        with pytest.raises(ag.AscendGradError) as info:
            function(*args, **kwargs, backend=self.backend)
        assert info.value.code == code
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        raise RefusedAsExpectedError

    def assert_right(self, problem: Problem, result: np.ndarray, *, axis: int | None = None) -> None:
        """Check that every element is within its bound, and record the largest error for the report after the run."""
        settings = problem.settings if axis is None else problem.settings | {"axis": axis}
        self.assert_within(
            oracles.expected(problem.operator, problem.arrays, **settings, out_dtype=result.dtype.newbyteorder("=")),
            problem,
            result,
        )

    def assert_within(self, expected: oracles.Expected, problem: Problem, result: np.ndarray) -> None:
        if self.name == "npu":
            expected = oracles.claimed_of_a_device(expected, problem.operator, problem.arrays, problem.settings)
        self._assert_within(expected, result, problem.operator, problem.dtype, f"{problem.shape} {problem.settings}")

    def _assert_within(self, expected: oracles.Expected, result: np.ndarray, name: str, dtype, text: str) -> None:
        errors = oracles.errors(result, expected)
        worst = float(np.max(errors, initial=0))
        # In a narrower result, the last rounding hides other errors, so its largest error is not recorded.
        if result.dtype == oracles.precision_of(dtype).dtype:
            row = largest_errors[name, str(dtype)]
            row[self.name] = max(row.get(self.name, 0.0), worst)
        if worst > 1:
            where = np.unravel_index(np.argmax(errors), errors.shape)
            pytest.fail(
                f"{name} {dtype} {text} on {self.name}, at {tuple(map(int, where))}: error {worst:.3g} times the bound "
                f"{expected.bound[where]}, expected {expected.values[where]}, got {result[where]}; "
                f"{np.sum(errors > 1)} of {errors.size} elements are wrong"
            )

    # -- the linear operators --

    def solve(self, problem: LinearProblem, **settings) -> tuple[np.ndarray | None, ...]:
        return self._call(problem, **problem.arguments, **settings)

    def assert_solved(
        self,
        problem: LinearProblem,
        results: tuple[np.ndarray | None, ...],
        expected: tuple[oracles.Expected | None, ...] | None = None,
    ) -> None:
        """Check that every element of every result is within its bound, and that results not requested are None."""
        expected = linear_oracles.expected(problem) if expected is None else expected
        if self.name == "npu":
            expected = linear_oracles.claimed_of_a_device(expected, problem)
        names = table.OPERATORS[problem.operator].results[: len(expected)]  # a loss has further results with options
        for name, result, right in zip(names, results, expected, strict=True):
            if result is None or right is None:
                assert result is None
                assert right is None
                continue
            assert result.shape == right.values.shape
            if self.name == "reference" and problem.dtype == np.float64:
                # The reference leaves sums of float64 to NumPy, which promises less accuracy.
                right = oracles.Expected(right.values, 32 * right.bound)
            right = linear_oracles.for_result(right, problem.dtype, result)
            text = f"{problem.shapes} constant {problem.constant}"
            self._assert_within(right, result, f"{problem.operator} {name}", problem.dtype, text)


@pytest.fixture
def forced() -> Iterator[Callable[[str], None]]:
    """Return a function that switches the CPU variant until the end of the test."""
    before = _cpu.variant()
    yield _cpu.force_variant
    _cpu.force_variant(before)


@pytest.fixture
def caches() -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Return sizes of L1, L2 and L3 of a small, a usual and a large CPU, and restore the real sizes after the test."""
    yield (16 << 10, 128 << 10, 1 << 20), (32 << 10, 1 << 20, 32 << 20), (128 << 10, 16 << 20, 256 << 20)
    _cpu.force_cache_sizes()


@pytest.fixture(scope="session")
def _installation() -> Iterator[tuple[StandIn, runtime.State]]:
    home = build(torch_npu_real.VARIANT)
    # The state without a device has to be found first: a later search by name would find the loaded libraries.
    runtime.state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_HOME_PATH", str(home))
        patch.delitem(runtime.found, "state")
        state = runtime.state()
    assert state.usable, state.reason
    stand_in = StandIn(home)
    yield stand_in, state
    gc.unfreeze()
    gc.collect()  # the collection frees arrays in the frames of errors that a test has caught
    npu.release()
    if not torch_npu_real.IS_INSTALLED:  # the real torch_npu keeps its streams
        assert stand_in.live() == {}


@pytest.fixture
def device(_installation, monkeypatch) -> Iterator[StandIn]:
    """Replace the device by a test double: the NPU backend is usable until the end of the test."""
    stand_in, state = _installation
    monkeypatch.setitem(runtime.found, "state", state)
    stand_in.reset()
    yield stand_in
    assert stand_in.violations() == []


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, forced) -> Engine:
    if request.param == "npu":
        request.getfixturevalue("device")
    elif request.param != "reference":
        forced(request.param)
    return Engine(request.param)


@pytest.fixture(params=VARIANTS)
def cpu_engine(request: pytest.FixtureRequest, forced) -> Engine:
    forced(request.param)
    return Engine(request.param)


@pytest.fixture
def cpu_engines(forced) -> Callable[[], Iterator[Engine]]:
    """Return a function that yields an engine for every variant in turn.

    It serves tests whose expected values take longer to compute than the results.
    """

    def engines() -> Iterator[Engine]:
        for name in VARIANTS:
            forced(name)
            yield Engine(name)

    return engines


@pytest.fixture
def default_engine() -> Engine:
    """Return the engine of the CPU variant that is chosen by default."""
    return Engine(_cpu.variant())


@pytest.fixture
def device_engine() -> Engine:
    """Return the engine whose bounds hold for results that a device computed in another process."""
    return Engine("npu")


@pytest.fixture(params=("cpu", "reference", "npu"))
def backend(request: pytest.FixtureRequest, monkeypatch) -> str:
    """Return the name of a backend. A test ends, and passes, if the device refuses a call that is beyond its limits."""
    if request.param == "npu":
        request.getfixturevalue("device")
        refusal = npu_backend.unsupported_reason

        def checked(call):
            refused = refusal(call)
            code = device_limits.code(call.operator.name, call.arguments)
            if code is None or code == 561103:  # the device itself returns 561103
                # For an operator without a vendor document the automatic choice is the CPU. Forced calls run.
                assert refused is None or (refused.error is None and (code or "the vendor documents" in refused.reason))
                return refused
            assert refused is not None
            assert refused.error is not None
            assert refused.error.code == code
            raise RefusedAsExpectedError

        monkeypatch.setattr(npu_backend, "unsupported_reason", checked)
    return request.param


@pytest.fixture
def computed_by(monkeypatch) -> list[str]:
    """Return a list to which each call of a backend's `run` adds the backend's name. The CPU has no such calls."""
    names: list[str] = []
    for name, backend in REGISTRY.items():

        def run(call, num_threads, name=name, original=backend.run):
            names.append(name)
            return original(call, num_threads)

        monkeypatch.setattr(backend, "run", run)
    return names


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=LINEAR)
def linear(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=tuple(DTYPES))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def _run(script: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_GRAD_")}
    result = subprocess.run(
        # "-P": the current folder may be the source tree, whose package has no compiled modules.
        [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(script)],
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    if check:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture
def run_script() -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that runs a script in a new Python process, with the given variables added to the environment.

    pytest's timeout is the only limit on the script's time, since an emulated CPU takes a hundred times as long.
    """
    return partial(_run)


@pytest.fixture(scope="session")
def optional_packages() -> tuple[str, ...]:
    """Return the names of the packages that tests use only where they are installed."""
    return (*ABOUT_PACKAGES, "distributed", "expecttest", "jaxlib", "xarray")


@pytest.fixture(scope="session")
def failing_malloc(tmp_path_factory) -> str:
    """Build a library that, preloaded into a process, fails the n-th allocation, and return its path."""
    library = tmp_path_factory.mktemp("malloc") / "failing_malloc.so"
    source = Path(__file__).parent / "support" / "failing_malloc.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", "-O1", source, "-o", library], check=True)
    return str(library)


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package, in which a test breaks something."""
    copy_of_the_package(tmp_path)
    return tmp_path


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Let Python threads run until they release the interpreter's lock themselves."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during the test, so that only the tested code changes counts of objects.

    The tested code should not need the collector.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def assert_references_stay(no_garbage_collection) -> Callable[..., None]:
    """Return a function that repeats calls, and checks that the counts of references to these objects stay."""

    def check(calls: Callable[[], None], counted: Sequence[object], repeats: int) -> None:
        calls()
        before = [sys.getrefcount(item) for item in counted]
        for _ in range(repeats):
            calls()
        grown = [sys.getrefcount(item) - count for item, count in zip(counted, before, strict=True)]
        assert max(map(abs, grown)) < repeats / 2, grown

    return check


@pytest.fixture(scope="session")
def needs_memory() -> Callable[[float], None]:
    """Return a function that skips the test if less memory than the given number of gigabytes is available."""

    def check(gigabytes: float) -> None:
        available = available_memory() / 1e9
        if available < gigabytes:
            pytest.skip(f"needs {gigabytes} GB of memory, {available:.1f} GB are available")

    return check


def available_memory() -> float:
    """Return the bytes that this process can still allocate, by the system and by its control group."""
    with open("/proc/meminfo") as lines:
        system = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # the file is missing, or the limit is "max"
        return system
    return min(system, limit - used + int(cache))
