"""Test the benchmark of the linear operators on tiny cases, from arguments to tables. No test depends on speed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.bench import accuracy, arrays, cases, documents, frameworks, measure, results
from ascend_grad.bench import report as tables
from ascend_grad.bench.case import DTYPES, FILTERED, GRADIENT, LINEAR_MODES, MAX_SUM, WHOLE, Case, numpy_dtype
from ascend_grad.bench.measure import DisagreementError
from ascend_grad.bench.results import OWN, UNFILTERED, YARDSTICK, Growth, Results, Row
from ascend_grad.bench.sides import linear
from ascend_grad.bench.targets import linear_targets, memory_targets
from ascend_grad.cli.main import main

TRAINED_LAYER = arrays.trained_layer
SHAPE = (5, 11, 3)
MODES = [*((operator, mode) for operator, modes in LINEAR_MODES.items() for mode in modes), (GRADIENT, FILTERED)]
SMALL = [Case(operator, "float32", SHAPE, mode) for operator, mode in MODES]


@pytest.fixture(autouse=True)
def _without_training(monkeypatch):
    """Use a random layer as the trained layer."""
    random = np.random.default_rng(0)

    def layer(rows):
        x, weight = (random.standard_normal((n, SHAPE[2])).astype(np.float32) for n in (rows, SHAPE[1]))
        return x, weight, random.integers(0, SHAPE[1], rows)

    monkeypatch.setattr(arrays, "trained_layer", layer)


@pytest.fixture
def sample() -> Results:
    """Make results in which this library reaches 1 TFLOP/s in every case, BLAS a half of it, other sides a tenth."""
    rows = []
    for case in cases.linear():
        own = case.operations / 1e12
        seconds = {OWN: own, YARDSTICK: 2 * results.YARDSTICK_SIZE**3 / 0.5e12}
        rows.append(Row(case, seconds | dict.fromkeys(("numpy", "torch", "torch chunked"), 10 * own)))
    memory = [
        Growth(case, side, size, 100)
        for case in cases.linear_memory()
        for side, size in ((OWN, 90), ("torch chunked", 200))
    ]
    return Results({"CPU": "an abacus", "variant": "avx512_bf16"}, 2, {"linear": rows, "memory": memory})


# ---- cases and sides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LINEAR_MODES[GRADIENT])
def test_the_backend_is_called_directly_beside_the_smallest_problem(mode, hasty):
    case = Case(GRADIENT, "float32", cases.SMALL_SHAPES[-1], mode)
    row = measure.measure(case, 1)
    assert row.seconds["direct"] > 0
    (target,) = [target for target in linear_targets([row], "avx2") if target.text.startswith("dispatch")]
    assert target.met is not None


def test_16_bits_are_measured_on_every_variant():
    found = {(c.operator, c.dtype, c.variant) for c in cases.linear() if c.shape == cases.VARIANTS_SHAPE}
    dtypes = ("bfloat16", "float16")
    assert found == set(itertools.product((GRADIENT, MAX_SUM, WHOLE), dtypes, cases.variants()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_beside_a_forced_variant_in_bfloat16_alone(dtype, monkeypatch):
    nn = SimpleNamespace(LinearCrossEntropyOptions=object, functional=SimpleNamespace(linear_cross_entropy=print))
    torch = SimpleNamespace(nn=nn, float32=None, float64=None, arange=np.arange)
    monkeypatch.setattr(frameworks, "module", lambda name: torch)
    monkeypatch.setattr(frameworks, "tensor", lambda array: array)
    for prepare, operator, mode in (
        (linear.torch_formula, MAX_SUM, "forward"),
        (linear.torch_chunked, WHOLE, "loss and gradients"),
    ):
        for variant in ("", "avx2"):
            case = Case(operator, dtype, SHAPE, mode, variant=variant)
            given = arrays.linear_arguments(case)
            takes_part = prepare(case, given, arrays.gradients_like(given)) is not None
            assert takes_part == (not variant or dtype == "bfloat16")


def test_operations_are_those_of_the_products():
    assert Case(GRADIENT, "float32", (2, 3, 5), "recomputed").operations == 6 * 30
    assert Case(GRADIENT, "float32", (2, 3, 5), "stored").operations == 4 * 30
    assert Case(MAX_SUM, "float32", (2, 3, 5), "forward").operations == 2 * 30


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.operator} {case.mode}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_case_is_measured(case, dtype):
    case = replace(case, dtype=dtype)
    row = measure.measure(case, 1)
    expected = {OWN, YARDSTICK, UNFILTERED if case.mode == "filtered" else "numpy"}
    assert set(row.seconds) == expected
    assert all(seconds > 0 for seconds in row.seconds.values())
    assert row.of_yardstick > 0


@pytest.mark.usefixtures("hasty")
def test_the_forced_variant_is_in_force_for_this_library_alone(monkeypatch):
    variant = _cpu.supported_variants()[0]
    case = Case(GRADIENT, "float32", SHAPE, "recomputed", variant=variant)
    right, seen, before = ag.fused_linear_cross_entropy_loss_grad, set(), _cpu.variant()

    def recorded(**settings):
        seen.add(_cpu.variant())
        return right(**settings)

    monkeypatch.setattr(ag, GRADIENT, recorded)
    assert set(measure.measure(case, 1).seconds) == {OWN, YARDSTICK}
    assert seen == {variant}
    assert _cpu.variant() == before


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("step", [0, 1])
def test_a_side_with_other_values_is_refused(step, monkeypatch):
    """A side with other values is refused, also one that does nothing and leaves the previous side's results."""

    def wrong(case, given, outs):
        return lambda: tuple(out + out.dtype.type(step) for out in outs)

    monkeypatch.setitem(linear.SIDES, "wrong", wrong)
    with pytest.warns(UserWarning, match=r"recomputed float32 5 × 11 × 3: wrong computes other values"):
        row = measure.measure(SMALL[0], 1)
    assert "numpy" in row.seconds
    assert "wrong" not in row.seconds
    monkeypatch.setitem(linear.SIDES, "numpy", wrong)
    with pytest.raises(DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
        measure.measure(SMALL[0], 1)


def test_the_trained_layer_is_that_of_the_demo(monkeypatch):
    monkeypatch.setattr(arrays, "STEPS", 1)
    x, weight, target = TRAINED_LAYER.__wrapped__(128)
    assert (len(x), len(target)) == (128, 128)
    assert x.dtype == weight.dtype == numpy_dtype("bfloat16")
    assert (x.shape[1], *weight.shape) == (cases.TRAINED_SHAPE[2], *cases.TRAINED_SHAPE[1:])


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_growth_is_that_of_the_call(run_script):
    """The measured growth is the memory of the call.

    The call runs in a separate process, since it would reuse memory that this process has freed.
    """
    run_script(
        """
        import numpy as np
        from ascend_grad.bench import measure

        size = 2**26
        grown = measure.resident_growth(lambda: np.ones(size, np.uint8).sum())
        assert 0.9 * size < grown < 1.5 * size, grown
        assert measure.resident_growth(lambda: None) < size / 8
        """
    )


@pytest.mark.usefixtures("hasty")
def test_memory_is_measured_beyond_the_results(monkeypatch):
    monkeypatch.setattr(cases, "MEMORY_SHAPE", (16, 3000, 32))
    found = [growth for case in cases.linear_memory() for growth in measure.memory(case, 1)]
    assert {growth.side for growth in found} == {OWN, "numpy"}
    assert all(growth.promise > 0 and growth.bytes >= 0 for growth in found)


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", accuracy.LINEAR)
def test_errors_are_within_their_bounds(operator, dtype, monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPES", ((3, 17, 5), (20, 3, 70)))
    monkeypatch.setattr(accuracy, "HUGE_SHAPES", ((1000, 2, 1),))
    found = accuracy.measure(operator, dtype)
    assert {worst.variant for worst in found} == set(_cpu.supported_variants())
    assert max(worst.error for worst in found) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", accuracy.LINEAR)
def test_wrong_results_exceed_their_bounds(operator, dtype):
    expected, call = accuracy.linear_expected(operator, accuracy.layer("centred", (17, 33, 9), dtype))
    for got, right in zip(call(), expected):
        assert accuracy.errors(got, right).max() <= 1
        # The step is large, since rounding a factor to bfloat16 may change a sum by more than two per cent.
        assert accuracy.errors(got * got.dtype.type(1.25), right).max() > 1
        assert np.isinf(accuracy.errors(np.full_like(got, np.nan), right)).any()


# ---- results, targets, tables ----------------------------------------------------------------------------------------


def test_targets_tell_what_is_met(sample):
    found = {target.text: target for target in linear_targets(sample["linear"], "avx512_bf16")}
    met = found["gradient, float32, rate of sgemm"]
    assert (met.met, met.required, met.measured) == (True, "≥ 1×", "2× (recomputed, float32, 1024 × 32768 × 1024)")
    assert found["gradient, bfloat16, rate of sgemm"].met
    slower = [replace(row, seconds=row.seconds | {OWN: 3 * row.own}) for row in sample["linear"]]
    lost = {target.text: target for target in linear_targets(slower, "avx512_bf16")}
    assert lost["gradient, float32, rate of sgemm"].met is False
    assert lost["gradient, float32, rate of sgemm"].measured.endswith("3 of 3 below")
    assert lost["whole loss, bfloat16, against chunked torch"].met is False


def test_bfloat16_has_its_target_where_the_cpu_has_dot_products(sample):
    found = {target.text: target for target in linear_targets(sample["linear"], "avx512")}
    target = found["gradient, bfloat16, rate of sgemm"]
    assert (target.met, target.measured) == (None, "needs avx512_bf16, this is avx512")
    assert found["gradient, bfloat16 by widening, rate of sgemm"].met
    widening = {target.text: target for target in linear_targets(sample["linear"], "avx512_bf16")}
    assert "gradient, bfloat16 by widening, rate of sgemm" not in widening


def test_memory_targets(sample):
    promise, chunked = memory_targets(sample["memory"])
    assert promise.met
    assert promise.measured.startswith("0.9×")
    assert chunked.met
    more = [replace(growth, bytes=2 * growth.bytes) if growth.side == OWN else growth for growth in sample["memory"]]
    assert [target.met for target in memory_targets(more)] == [False, True]
    assert memory_targets([])[0].met is None


def test_tables_are_rectangular(sample):
    blocks = documents.blocks({"linear": sample})
    tables_of = {"linear_rows", "linear_memory", "linear_targets"}
    assert set(blocks) == {"linear_machine", *tables_of}
    for name in tables_of:
        assert len({line.count("|") for line in blocks[name].splitlines()}) == 1
        assert len({len(line) for line in blocks[name].splitlines()}) == 1
    assert tables.linear_rows(sample["linear"]).count(" 1000 |") == len(sample["linear"])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "linear", lambda quick: SMALL)
    monkeypatch.setattr(cases, "MEMORY_SHAPE", (16, 3000, 32))
    file = tmp_path / "results.json"
    assert main(["bench", "linear", "--filter", "recomputed", "--threads", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"{GRADIENT} recomputed float32 5 × 11 × 3" in out
    assert "MiB beyond the results" in out
    found = Results.from_json(file.read_text())
    assert [row.case for row in found["linear"]] == SMALL[:1]
    assert {growth.case.operator for growth in found["memory"]} == {GRADIENT}


@pytest.mark.usefixtures("hasty")
def test_cases_that_fail_leave_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "linear", lambda quick: SMALL)

    def fails(*args, **kwargs):
        raise MemoryError("1 TiB")

    monkeypatch.setattr(ag, "linear_cross_entropy", fails)
    file = tmp_path / "results.json"
    assert main(["bench", "linear", "--quick", "--json", str(file)]) == 1
    out, err = capsys.readouterr()
    failed = [case for case in SMALL if case.operator == WHOLE]
    found = Results.from_json(file.read_text())
    assert failed
    assert [row.case for row in found["linear"]] == [case for case in SMALL if case not in failed]
    assert [failure.case for failure in found["failures"]] == [case.name for case in failed]
    assert all(f"| {row.case.name} " in out for row in found["linear"])
    assert all(f"failed: {case.name}: MemoryError: 1 TiB\n" in err for case in failed)
