"""Test the benchmark's random problems. No test depends on the speed of the machine."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from samples import DTYPES
from scipy import special

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.bench import arrays, case, cases, charts, documents, frameworks, measure, sides
from ascend_grad.bench import report as tables
from ascend_grad.bench.case import IN_PLACE, LAYOUTS, LINEAR_MODES, MASKED, MAX_SUM, RANDOM, WHOLE, Case
from ascend_grad.bench.measure import DisagreementError
from ascend_grad.bench.results import (
    CHAIN,
    ESTIMATE,
    NUMPY,
    OWN,
    PRODUCTS,
    SKLEARN,
    STREAM,
    TORCH,
    Failure,
    Results,
    Row,
    side_of,
)
from ascend_grad.cli.main import main


def rowwise(operator: str = "softmax_backward", dtype: str = "float32", **fields) -> Case:
    shape = (2, 3, 5, 5) if operator in MASKED else (3, 4, 5)
    order = case.C_ORDER
    problem = Case(operator, dtype, shape, "out", len(shape) - 1, order, order, dtype, suite=RANDOM)
    return replace(problem, **fields)


LINEAR = Case(MAX_SUM, "float32", (3, 4, 5), "forward", suite=RANDOM)


def row(numpy: float, torch: float | None = None, case=None, **seconds) -> Row:
    others = {"numpy": numpy} | ({} if torch is None else {"torch": torch})
    return Row(case or rowwise(), {OWN: 1.0} | others | seconds)


# ---- problems --------------------------------------------------------------------------------------------------------


def test_the_seed_decides():
    first = cases.draw(60, 1)
    assert first == cases.draw(60, 1)
    assert first[:20] == cases.draw(20, 1)
    assert first != cases.draw(60, 2)


def test_everything_occurs_in_a_few_hundred_problems():
    drawn = cases.draw(600, 0)
    rowwise = [problem for problem in drawn if problem.dim is not None]
    linear = [problem for problem in drawn if problem.dim is None]
    assert len(linear) == 3 * 600 // 10
    assert {problem.operator for problem in drawn} == set(cases.OPERATORS)
    for part in (rowwise, linear):
        assert {problem.dtype for problem in part} == set(DTYPES)
    kinds = {*LAYOUTS, *case.STRANGE}
    assert {case.kind_of(problem.arrangement) for problem in rowwise} == kinds
    repeated = {case.BROADCAST, case.FIRST_STRIDE_0, case.ALL_STRIDE_0}
    assert {case.kind_of(problem.out_arrangement) for problem in rowwise} == kinds - repeated
    assert {problem.mode for problem in rowwise} == {"fresh", "out", IN_PLACE}
    assert {len(problem.shape) for problem in rowwise} == set(range(1, 9))
    assert {(a.dtype, a.out_dtype) for a in rowwise} == {(a, b) for a in DTYPES for b in DTYPES}
    assert min(problem.size for problem in rowwise) < 32
    assert max(problem.size for problem in rowwise) > 2**20


def test_sizes_are_bounded():
    # Each length is rounded by up to a half, so that a size may exceed the limit of 1000.
    assert all(math.prod(problem.shape) < 2000 for problem in cases.draw(200, 0, case.ROWWISE, 1000))
    for problem in cases.draw(200, 0, case.LINEAR):
        assert math.prod(problem.shape) <= cases.MAX_PRODUCT


def test_layouts_are_chosen():
    plain, strange = (cases.draw(60, 0, case.ROWWISE, layouts=layouts) for layouts in ("plain", "strange"))
    assert {problem.arrangement for problem in plain} <= set(LAYOUTS)
    assert {case.kind_of(problem.arrangement) for problem in strange} == set(case.STRANGE)
    # Half of the problems are plain, with the same seeds.
    assert 15 < sum(problem in plain for problem in cases.draw(60, 0, case.ROWWISE)) < 45


def test_linear_problems_with_few_rows_or_classes():
    shapes = [problem.shape for problem in cases.draw(200, 0, case.LINEAR, max_rows=100)]
    assert all(min(rows, classes) <= 100 for rows, classes, _ in shapes)
    assert max(rows for rows, _, _ in shapes) > 1000 < max(classes for _, classes, _ in shapes)


def test_classifiers():
    problems = cases.few_classes(60, 3)
    assert problems[:20] == cases.few_classes(20, 3)
    for problem in problems:
        assert problem.has_rivals
        for length, (low, high) in zip(problem.shape, cases.FEW_CLASSES):
            assert low <= length <= high


def test_a_classifier_is_measured(hasty, monkeypatch):
    monkeypatch.setattr(cases, "FEW_CLASSES", ((30, 60), (2, 6), (4, 9)))
    for problem in cases.few_classes(3, 0):
        row = measure.measure(problem, 1)
        assert {OWN, "numpy", CHAIN} <= set(row.seconds)


def test_scikit_learn_computes_the_same(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(cases, "FEW_CLASSES", ((30, 60), (3, 6), (4, 9)))
    for problem in cases.few_classes(4, 0):
        with measure.prepared(problem, 1) as comparison:
            calls, _ = measure.agreeing(problem.name, comparison)
        assert {OWN, *SKLEARN} <= set(calls)


def test_names_tell_problems_apart():
    drawn = set(cases.draw(300, 0))
    assert len({problem.name for problem in drawn}) == len(drawn)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_layouts_keep_the_values(layout, shape, dtype):
    values = np.arange(math.prod(shape)).reshape(shape).astype(DTYPES[dtype])
    for axis in range(len(shape)):
        found = arrays.arranged(values, layout, axis)
        assert found.dtype.newbyteorder("=") == values.dtype
        assert found.shape == shape
        if layout != case.BROADCAST:
            np.testing.assert_array_equal(found.astype(np.float64), values.astype(np.float64))
        assert found.dtype.isnative == (layout != case.BYTE_SWAPPED)


def test_layouts_are_what_their_names_say():
    values = np.zeros((3, 4, 5), np.float32)
    found = {layout: arrays.arranged(values, layout, 1) for layout in LAYOUTS}
    strides = {layout: tuple(step // 4 for step in array.strides) for layout, array in found.items()}
    assert strides == {
        "C order": (20, 5, 1),
        "Fortran order": (1, 3, 12),
        "transposed": (5, 15, 1),
        "every second": (40, 10, 2),
        "negative steps": (-20, -5, -1),
        "one column of five": (100, 25, 5),
        "broadcast": (0, 5, 1),
        "byte-swapped": (20, 5, 1),
    }
    elements = {layout: arrays.memory_of(array).size for layout, array in found.items()}
    assert elements == dict.fromkeys(LAYOUTS, 60) | {
        "every second": 120,
        "one column of five": 300,
        "broadcast": 20,
    }


def test_strange_layouts_are_what_their_names_say():
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    strides = {
        "steps of 3": (60, 15, 3),
        "one column of 4": (80, 20, 4),
        "axes in order 2 0 1": (4, 1, 12),
        "first with stride 0 along 1": (5, 0, 1),
        "all with stride 0 along 0 2": (0, 1, 0),
    }
    for layout, steps in strides.items():
        found = arrays.arranged(values, layout, 1)
        assert found.shape == values.shape
        assert tuple(step // 4 for step in found.strides) == steps
        assert arrays.is_dense(found) == (layout == "axes in order 2 0 1")
        if "stride 0" not in layout:
            np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(("layout", "count"), [(case.FIRST_STRIDE_0, 1), (case.ALL_STRIDE_0, 2)])
def test_operands_with_stride_0(layout, count):
    inputs = arrays.operands(rowwise(arrangement=f"{layout} 1")).inputs
    assert sum(array.strides[1] == 0 for array in inputs) == count


@pytest.mark.parametrize("problem", cases.draw(60, 0, case.ROWWISE, 200), ids=lambda problem: problem.name)
def test_widened_arrays_keep_their_layouts(problem):
    given = arrays.operands(replace(problem, dtype="float16", out_dtype="float16"))
    wide = arrays.widened(problem, given)
    for found, array in zip((*wide.inputs, wide.out), (*given.inputs, given.out)):
        if array.dtype != bool:
            assert found.dtype == np.float32
            assert [step // found.itemsize for step in found.strides] == [step // 2 for step in array.strides]
            np.testing.assert_array_equal(found, array.astype(np.float32))


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", case.ROWWISE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_rowwise_sides_agree(operator, dtype, layout, mode, hasty):
    if (layout, mode) == (case.BROADCAST, IN_PLACE):
        return
    found = measure.measure(rowwise(operator, dtype, arrangement=layout, mode=mode), 1)
    assert set(NUMPY[: 2 if operator == "softmax_backward" else 1]) < set(found.seconds)
    assert ("numpy widened" in found.seconds) == (dtype in ("float16", "bfloat16"))


@pytest.mark.parametrize("problem", cases.draw(70, 0, case.ROWWISE, 60, "strange"), ids=lambda problem: problem.name)
def test_sides_agree_in_strange_layouts(problem, hasty):
    found = measure.measure(problem, 1)
    strided = not all(map(arrays.is_dense, [*(made := arrays.operands(problem)).inputs, made.out]))
    assert ("numpy dense" in found.seconds) == (strided and problem.operator != case.CROSS_ENTROPY)


@pytest.mark.parametrize("operator", case.ROWWISE)
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_estimates_are_kept(operator, mode, hasty):
    assert 0 < measure.measure(rowwise(operator, mode=mode), 1).seconds[ESTIMATE] < 1e-3


@pytest.mark.parametrize("operator", case.ROWWISE)
@pytest.mark.parametrize("out_dtype", list(DTYPES))
def test_results_of_another_dtype_agree(operator, dtype, out_dtype, hasty):
    measure.measure(rowwise(operator, dtype, out_dtype=out_dtype, out_arrangement="Fortran order"), 1)


@pytest.mark.parametrize("operator", case.ROWWISE)
@pytest.mark.parametrize("mode", ["out", IN_PLACE])
def test_results_that_are_rounding_alone_agree(operator, dtype, mode, hasty):
    shape = (2, 300, 1, 1) if operator in MASKED else (600, 1)
    measure.measure(rowwise(operator, dtype, shape=shape, dim=len(shape) - 1, mode=mode), 1)


@pytest.mark.parametrize("operator", case.LINEAR)
def test_a_single_word_agrees(operator, dtype, hasty):
    for mode in LINEAR_MODES[operator]:
        measure.measure(Case(operator, dtype, (500, 1, 24), mode, suite=RANDOM), 1)


@pytest.mark.parametrize("problem", cases.draw(12, 0, case.LINEAR), ids=lambda problem: problem.name)
def test_linear_sides_agree(problem, hasty):
    found = measure.measure(replace(problem, shape=(3, 7, 4)), 1)
    assert {OWN, "numpy", PRODUCTS} <= set(found.seconds)


@pytest.mark.parametrize("operator", case.LINEAR)
def test_linear_problems_of_16_bits_are_computed_on_every_variant(operator, dtype, hasty, monkeypatch):
    seen, right = set(), getattr(ag, operator)

    def recorded(*args, **kwargs):
        seen.add(_cpu.variant())
        return right(*args, **kwargs)

    monkeypatch.setattr(ag, operator, recorded)
    variants = set(cases.variants()) if DTYPES[dtype].itemsize == 2 else set()
    found = measure.measure(Case(operator, dtype, (3, 7, 4), LINEAR_MODES[operator][0], suite=RANDOM), 1)
    assert {side for side in found.seconds if side.startswith(f"{OWN} ")} == {side_of(v) for v in variants}
    assert seen == variants | {_cpu.variant()}


@pytest.mark.parametrize("operator", ["softmax", "log_softmax"])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_scipy_takes_part(operator, mode, dtype, hasty, monkeypatch):
    monkeypatch.setattr(frameworks, "module", {"scipy.special": special}.get)
    assert "scipy" in measure.measure(rowwise(operator, dtype, mode=mode), 1).seconds


def test_limits_are_measured_beside_larger_problems(hasty, monkeypatch):
    monkeypatch.setattr(sides, "SMALLEST_STREAM", 0)
    for mode in ("fresh", "out", IN_PLACE):
        assert {*STREAM} < set(measure.measure(rowwise(mode=mode), 1).seconds)
    seconds = measure.measure(LINEAR, 1).seconds
    assert {*STREAM, PRODUCTS} < set(seconds)


def test_gradients_do_not_shrink_while_times_are_taken(hasty):
    comparison = sides.compared(rowwise(mode=IN_PLACE), 1)
    comparison.reset()
    comparison.before_timing()
    assert not np.any(comparison.calls[OWN]())


def test_the_order_of_sides_changes(hasty):
    order = []
    measure.least_in_turns({name: lambda name=name: order.append(name) for name in "abc"}, {}, {}, 8)
    blocks = [name for name, _ in itertools.groupby(order)]
    assert len({tuple(blocks[i : i + 2]) for i in range(len(blocks) - 1)}) > 3


@pytest.mark.parametrize("first", [{}, {OWN: 1.0, "near": 2.0, "far": 4.0}])
def test_sides_far_behind_have_two_turns(first, hasty, monkeypatch):
    """A side that is far behind is timed only twice.

    A limit, which can be far ahead, does not decide which sides are far behind. A call that is known to be long has no
    warm-up.
    """
    monkeypatch.setattr(measure, "SLOW", 0.0)
    warm = []
    monkeypatch.setattr(measure, "warm_up", lambda call: warm.append(call) or 1.0)
    seconds = {OWN: 1.0, "near": 2.0, "far": 4.0, "limit": 0.1}
    turns = dict.fromkeys(seconds, 0)

    def loop(name, count):
        turns[name] += 1
        return seconds[name]

    monkeypatch.setattr(measure, "_least_loop", loop)
    names = {name: name for name in seconds if name != "limit"}
    assert measure.least_in_turns(names, {"limit": "limit"}, first, 5) == seconds
    assert turns == {OWN: 5, "near": 5, "far": 2, "limit": 5}
    assert set(warm) == ({"limit"} if first else set(seconds))


def test_a_problem_that_failed_is_not_tried_again(monkeypatch):
    attempts = []

    def measured(problem, num_threads):
        attempts.append(problem)
        raise DisagreementError("numpy computes other values than ascend_grad")

    monkeypatch.setattr(measure, "measure", measured)
    failures: list[Failure] = []
    assert measure.measure_all([LINEAR], 1, iter, failures) == []
    assert attempts == [LINEAR]
    assert failures == [Failure(LINEAR.name, "numpy computes other values than ascend_grad")]


# ---- results and reports ---------------------------------------------------------------------------------------------


@pytest.fixture
def sample() -> Results:
    """Make results: NumPy takes 0.5, 0.95, 8 and 2 times as long as this library, torch 4, 1 and 0.25 times."""
    rows = [
        row(0.5, 4.0, **{STREAM[0]: 0.2, STREAM[1]: 0.1}),
        row(0.95, 1.0, rowwise(dtype="bfloat16", arrangement="transposed"), **{"numpy widened": 0.25}),
        row(8.0, None, rowwise("softmax", mode="fresh"), **{"numpy dot": 16.0}),
        row(2.0, 0.25, LINEAR, **{STREAM[0]: 0.2, PRODUCTS: 0.9}),
    ]
    sections = {"rowwise": rows[:3], "linear": rows[3:], "failures": [Failure("x", "no")]}
    return Results({"CPU": "an abacus"}, 2, sections, {"count": 4, "seed": 7})


def test_the_summary_counts_what_is_lost(sample):
    lines = {
        cells[0]: cells[1:]
        for line in tables.summary_table(tables.grid_groups([sample]), tables.RIVALS).splitlines()[2:]
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    # The columns are: the number of problems; NumPy's mean and shares below 1 and 0.9; widened arrays; SciPy; torch.
    unknown, third = ["–"] * 3, ["33 %"] * 2
    assert lines["all"] == ["4", "1.66×", "50 %", "25 %", "0.25×", "100 %", "100 %", *unknown, "1.00×", *third]
    assert lines["row-wise"][:4] == ["3", "1.56×", "67 %", "33 %"]
    assert lines["linear"][:4] == ["1", "2.00×", "0 %", "0 %"]
    assert lines["row-wise, bfloat16"][1] == lines["row-wise, transposed"][1] == "0.95×"
    assert lines["linear, float32"][-3:] == ["0.25×", "100 %", "100 %"]
    assert lines["softmax"][0] == "1"
    assert "seed 7" not in lines
    assert "seed 8" in tables.grid_groups([sample, replace(sample, facts={"seed": 8})])


def test_onednn_has_a_column_where_it_takes_part(sample):
    def titles(results):
        return tables.summary_table(tables.grid_groups([results]), tables.RIVALS).splitlines()[0]

    assert "oneDNN" not in titles(sample)
    assert "oneDNN" not in tables.worst_block(sample.rows, NUMPY)
    sample.rows[0].seconds["oneDNN"] = 2.0
    assert "oneDNN" in titles(sample)
    assert "| oneDNN |" in tables.worst_block(sample.rows, NUMPY)
    assert "grid_worst_onednn" in tables.grid_blocks([sample])


def test_estimates_have_a_table(sample):
    assert tables.estimates_block(sample.rows).startswith("These results have no estimates")
    steps = rowwise("softmax", arrangement="steps of 3")
    rows = [row(1.0, case=problem, **{ESTIMATE: estimate}) for problem, estimate in zip([rowwise(), steps], [0.5, 3])]
    rows.append(Row(steps, {OWN: 1e-6, ESTIMATE: 1e-7}))
    lines = tables.estimates_block([*rows, *sample.rows]).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["all", "2", "1.75×", "1.00×", "0 %", "50 %"],
        ["softmax_backward", "1", "0.50×", "0.29×", "0 %", "0 %"],
        ["softmax", "1", "3.00×", "1.71×", "0 %", "100 %"],
        ["C order", "1", "0.50×", "0.29×", "0 %", "0 %"],
        ["steps of", "1", "3.00×", "1.71×", "0 %", "100 %"],
    ]


def test_variants_have_a_table(sample):
    assert tables.variants_block(sample["linear"]).startswith("These results have no times of each variant")
    rows = [
        row(6.0, torch, replace(LINEAR, dtype=dtype), **{side_of("baseline"): 12.0, side_of("avx2"): 3.0})
        for dtype, torch in (("bfloat16", 24.0), ("bfloat16", 6.0), ("float16", None))
    ]
    lines = tables.variants_block(rows).splitlines()[2:]
    no_torch = ["–"] * 3
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["bfloat16, baseline", "2", "0.50×", "100 %", "100 %", "1.00×", "50 %", "50 %"],
        ["bfloat16, avx2", "2", "2.00×", "0 %", "0 %", "4.00×", "0 %", "0 %"],
        ["float16, baseline", "1", "0.50×", "100 %", "100 %", *no_torch],
        ["float16, avx2", "1", "2.00×", "0 %", "0 %", *no_torch],
    ]


def test_limits_excuse(sample):
    first, second, _, linear = sample.rows
    assert tables.limit_share(first) == 0.1
    assert tables.limit_share(second) is None
    assert tables.limit_share(linear) == 0.9
    assert first.case.name in tables.grid_lost(sample.rows)
    at_the_limit = replace(first, seconds=first.seconds | {STREAM[0]: 0.9, STREAM[1]: 0.86})
    assert tables.grid_lost([at_the_limit, *sample.rows[1:]]) == "None.\n"
    assert " 86 % * |" in tables.worst_block([at_the_limit], NUMPY)


def test_the_worst_come_first(sample):
    worst = tables.worst_block(sample.rows, TORCH, 2).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in worst] == [LINEAR.name, sample.rows[1].case.name]


def cells_of(block):
    lines = (line.strip("|").split("|") for line in block.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line] for line in lines]


def test_the_overview_has_a_column_for_each_rival(sample):
    header, _, *lines = cells_of(tables.overview_block([sample]))
    assert header == ["rival", "problems", "NumPy", "NumPy, widened", "torch"]
    assert lines == [
        ["row-wise", "3", "1.56× (33 %)", "0.25× (100 %)", "2.00× (0 %)"],
        ["linear", "1", "2.00× (0 %)", "–", "0.25× (100 %)"],
    ]


def test_the_overview_has_classifiers_if_they_were_measured(sample):
    rows = [
        Row(problem, {OWN: 1.0, "numpy": 2.0, **dict.fromkeys(SKLEARN, 3.0)}) for problem in cases.few_classes(4, 0)
    ]
    header, *_, line = cells_of(tables.overview_block([sample], rows))
    assert header[-1] == "scikit-learn"
    assert line == ["classifiers", "4", "2.00× (0 %)", "–", "–", "3.00× (0 %)"]
    found = tables.classifier_blocks(rows)
    assert "| all " in found["classifier_rows"]
    assert rows[0].case.name in found["classifier_worst"]


def test_the_chart_is_the_same_for_the_same_results(sample, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        charts.grid_chart([sample], tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", [[], ["linear"], ["softmax", WHOLE]])
def test_a_small_grid(operators, hasty, tmp_path, capsys):
    file = tmp_path / "grid.json"
    options = ["--operators", *operators] if operators else []
    arguments = ["random", "--count", "10", "--seed", "3", "--max-elements", "500", "--threads", "2", "--json"]
    assert main(["bench", *arguments, str(file), *options]) == 0
    found = Results.from_json(file.read_text())
    chosen = {"linear": case.LINEAR}.get("".join(operators[:1]), operators) or cases.OPERATORS
    assert {row.case.operator for row in found.rows} == set(chosen)
    assert (found.facts, len(found.rows)) == ({"count": 10, "seed": 3}, 10)
    out = capsys.readouterr().out
    assert "with 2 threads" in out
    assert all(row.case.name in out for row in found.rows)


def test_a_grid_with_a_picture(hasty, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.svg"
    assert main(["bench", "random", "--count", "2", "--max-elements", "50", "--plot", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")


def test_wrong_values_are_a_failure(hasty, monkeypatch, tmp_path, capsys):
    def wrong(*args, right=ag.softmax, **kwargs):
        result = right(*args, **kwargs)
        result[...] += 1
        return result

    monkeypatch.setattr(ag, "softmax", wrong)
    file = tmp_path / "grid.json"
    operators = ["--operators", "softmax", "log_softmax"]
    assert main(["bench", "random", "--count", "2", "--max-elements", "50", *operators, "--json", str(file)]) == 1
    (failure,) = Results.from_json(file.read_text())["failures"]
    assert failure.error == "numpy computes other values than ascend_grad"
    assert f"failed: {failure.case}" in capsys.readouterr().err


def test_results_are_kept_with_the_sources(hasty, monkeypatch, tmp_path):
    document = tmp_path / "benchmark.md"
    document.write_text("<!-- bench:grid_summary:begin -->\n<!-- bench:grid_summary:end -->\n")
    monkeypatch.setattr(documents, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(cases, "MAX_ELEMENTS", 50)
    for seed in ("0", "1", "1"):
        assert main(["bench", "random", "--count", "2", "--seed", seed, "--update-readme"]) == 0
    assert [grid.facts["seed"] for grid in documents.kept_grids(documents.FOLDER)] == [0, 1]
    assert "| seed 1 " in document.read_text()
