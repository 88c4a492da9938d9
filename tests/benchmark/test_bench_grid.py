"""Test the benchmark's random problems. No test depends on the speed of the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import DTYPES
from scipy import special

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.bench import documents, frameworks, stream
from ascend_grad.bench import measure as timing
from ascend_grad.bench.grid import chart, layouts, measure, problems, rivals
from ascend_grad.bench.grid import report as tables
from ascend_grad.bench.grid.problems import IN_PLACE, RowwiseProblem
from ascend_grad.bench.grid.results import GridResults
from ascend_grad.bench.linear import cases
from ascend_grad.bench.linear.cases import MAX_SUM, WHOLE, LinearCase
from ascend_grad.bench.results import OWN, Failure, Row
from ascend_grad.bench.rowwise.cases import MASKED
from ascend_grad.cli.main import main


@pytest.fixture
def hasty(monkeypatch):
    """Make turns a few microseconds long, and leave out optional packages."""
    monkeypatch.setattr(frameworks, "module", lambda name: None)
    monkeypatch.setattr(timing, "WARM_UP", 1e-6)
    for name in ("TURN", "LOOP", "PAUSE"):
        monkeypatch.setattr(measure, name, 1e-6)
    monkeypatch.setattr(measure, "TURNS", 2)
    monkeypatch.setattr(rivals, "PRODUCT_SIZE", 8)
    monkeypatch.setattr(problems, "MAX_PRODUCT", 2**12)


def rowwise(operator: str = "softmax_backward", dtype: str = "float32", **fields) -> RowwiseProblem:
    shape = (2, 3, 5, 5) if operator in MASKED else (3, 4, 5)
    problem = RowwiseProblem(operator, dtype, shape, len(shape) - 1, "out", layouts.C_ORDER, layouts.C_ORDER, dtype)
    return replace(problem, **fields)


LINEAR = LinearCase(MAX_SUM, "forward", "float32", (3, 4, 5))


def row(numpy: float, torch: float | None = None, case=None, **seconds) -> Row:
    others = {"numpy": numpy} | ({} if torch is None else {"torch": torch})
    return Row(case or rowwise(), {OWN: 1.0} | others | seconds)


# ---- problems --------------------------------------------------------------------------------------------------------


def test_the_seed_decides():
    first = problems.draw(60, 1)
    assert first == problems.draw(60, 1)
    assert first[:20] == problems.draw(20, 1)
    assert first != problems.draw(60, 2)


def test_everything_occurs_in_a_few_hundred_problems():
    drawn = problems.draw(600, 0)
    rowwise = [problem for problem in drawn if isinstance(problem, RowwiseProblem)]
    linear = [problem for problem in drawn if isinstance(problem, LinearCase)]
    assert len(linear) == 3 * 600 // 10
    assert {problem.operator for problem in drawn} == set(problems.OPERATORS)
    for part in (rowwise, linear):
        assert {problem.dtype for problem in part} == set(DTYPES)
    for problem in ("arrangement", "out_arrangement"):
        missing = {layouts.BROADCAST} if problem == "out_arrangement" else set()
        assert {getattr(p, problem) for p in rowwise} == set(layouts.LAYOUTS) - missing
    assert {problem.mode for problem in rowwise} == {"fresh", "out", IN_PLACE}
    assert {len(problem.shape) for problem in rowwise} == set(range(1, 9))
    assert {(a.dtype, a.out_dtype) for a in rowwise} == {(a, b) for a in DTYPES for b in DTYPES}
    assert min(problem.size for problem in rowwise) < 32
    assert max(problem.size for problem in rowwise) > 2**20


def test_sizes_are_bounded():
    # Each length is rounded by up to a half, so that a size may exceed the limit of 1000.
    assert all(math.prod(problem.shape) < 2000 for problem in problems.draw(200, 0, problems.ROWWISE, 1000))
    for problem in problems.draw(200, 0, problems.LINEAR):
        assert math.prod(problem.shape) <= problems.MAX_PRODUCT


def test_names_tell_problems_apart():
    drawn = set(problems.draw(300, 0))
    assert len({problem.name for problem in drawn}) == len(drawn)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_layouts_keep_the_values(layout, shape, dtype):
    values = np.arange(math.prod(shape)).reshape(shape).astype(DTYPES[dtype])
    for axis in range(len(shape)):
        found = layouts.arranged(values, layout, axis)
        assert found.dtype.newbyteorder("=") == values.dtype
        assert found.shape == shape
        if layout != layouts.BROADCAST:
            np.testing.assert_array_equal(found.astype(np.float64), values.astype(np.float64))
        assert found.dtype.isnative == (layout != layouts.BYTE_SWAPPED)


def test_layouts_are_what_their_names_say():
    values = np.zeros((3, 4, 5), np.float32)
    found = {layout: layouts.arranged(values, layout, 1) for layout in layouts.LAYOUTS}
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
    elements = {layout: layouts.memory_of(array).size for layout, array in found.items()}
    assert elements == dict.fromkeys(layouts.LAYOUTS, 60) | {
        "every second": 120,
        "one column of five": 300,
        "broadcast": 20,
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", problems.ROWWISE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_rowwise_sides_agree(operator, dtype, layout, mode, hasty):
    if (layout, mode) == (layouts.BROADCAST, IN_PLACE):
        return
    found = measure.measure(rowwise(operator, dtype, arrangement=layout, mode=mode), 1)
    assert set(rivals.NUMPY[: 2 if operator == "softmax_backward" else 1]) < set(found.seconds)
    assert ("numpy widened" in found.seconds) == (dtype in ("float16", "bfloat16"))


@pytest.mark.parametrize("operator", problems.ROWWISE)
@pytest.mark.parametrize("out_dtype", list(DTYPES))
def test_results_of_another_dtype_agree(operator, dtype, out_dtype, hasty):
    measure.measure(rowwise(operator, dtype, out_dtype=out_dtype, out_arrangement="Fortran order"), 1)


@pytest.mark.parametrize("operator", problems.ROWWISE)
@pytest.mark.parametrize("mode", ["out", IN_PLACE])
def test_results_that_are_rounding_alone_agree(operator, dtype, mode, hasty):
    shape = (2, 300, 1, 1) if operator in MASKED else (600, 1)
    measure.measure(rowwise(operator, dtype, shape=shape, dim=len(shape) - 1, mode=mode), 1)


@pytest.mark.parametrize("operator", problems.LINEAR)
def test_a_single_word_agrees(operator, dtype, hasty):
    for mode in problems.LINEAR_MODES[operator]:
        measure.measure(LinearCase(operator, mode, dtype, (500, 1, 24)), 1)


@pytest.mark.parametrize("problem", problems.draw(12, 0, problems.LINEAR), ids=lambda problem: problem.name)
def test_linear_sides_agree(problem, hasty):
    found = measure.measure(replace(problem, shape=(3, 7, 4)), 1)
    assert {OWN, "numpy", rivals.PRODUCTS} <= set(found.seconds)


@pytest.mark.parametrize("operator", problems.LINEAR)
def test_linear_problems_of_16_bits_are_computed_on_every_variant(operator, dtype, hasty, monkeypatch):
    seen, right = set(), getattr(ag, operator)

    def recorded(*args, **kwargs):
        seen.add(_cpu.variant())
        return right(*args, **kwargs)

    monkeypatch.setattr(ag, operator, recorded)
    variants = set(cases.variants()) if DTYPES[dtype].itemsize == 2 else set()
    found = measure.measure(LinearCase(operator, problems.LINEAR_MODES[operator][0], dtype, (3, 7, 4)), 1)
    assert {side for side in found.seconds if side.startswith(f"{OWN} ")} == {rivals.side_of(v) for v in variants}
    assert seen == variants | {_cpu.variant()}


@pytest.mark.parametrize("operator", ["softmax", "log_softmax"])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_scipy_takes_part(operator, mode, dtype, hasty, monkeypatch):
    monkeypatch.setattr(frameworks, "module", {"scipy.special": special}.get)
    assert "scipy" in measure.measure(rowwise(operator, dtype, mode=mode), 1).seconds


def test_limits_are_measured_beside_larger_problems(hasty, monkeypatch):
    monkeypatch.setattr(stream, "SMALLEST", 0)
    for mode in ("fresh", "out", IN_PLACE):
        assert {stream.ORDINARY, stream.NON_TEMPORAL} < set(measure.measure(rowwise(mode=mode), 1).seconds)
    seconds = measure.measure(LINEAR, 1).seconds
    assert {stream.ORDINARY, stream.NON_TEMPORAL, rivals.PRODUCTS} < set(seconds)


def test_gradients_do_not_shrink_while_times_are_taken(hasty):
    comparison = rivals.compared(rowwise(mode=IN_PLACE), 1)
    comparison.reset()
    comparison.before_timing()
    assert not np.any(comparison.calls[OWN]())


def test_the_order_of_sides_changes(hasty, monkeypatch):
    monkeypatch.setattr(measure, "TURNS", 8)
    order = []
    measure.least_in_turns({name: lambda name=name: order.append(name) for name in "abc"}, {})
    blocks = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert len({tuple(blocks[i : i + 2]) for i in range(len(blocks) - 1)}) > 3


def test_sides_far_behind_have_two_turns(hasty, monkeypatch):
    """A side that is far behind is timed only twice.

    A limit, which can be far ahead, does not decide which sides are far behind.
    """
    monkeypatch.setattr(measure, "TURNS", 5)
    monkeypatch.setattr(measure, "SLOW", 0.0)
    monkeypatch.setattr(timing, "warm_up", lambda call: 1.0)
    seconds = {OWN: 1.0, "near": 2.0, "far": 4.0, "limit": 0.1}
    turns = dict.fromkeys(seconds, 0)

    def loop(name, count):
        turns[name] += 1
        return seconds[name]

    monkeypatch.setattr(measure, "_least_loop", loop)
    names = {name: name for name in seconds if name != "limit"}
    assert measure.least_in_turns(names, {"limit": "limit"}) == seconds
    assert turns == {OWN: 5, "near": 5, "far": 2, "limit": 5}


def test_problems_are_measured_again_and_the_best_counts_for_all(monkeypatch):
    """Problems are measured again, and each side keeps its best time, so that rivals profit as much as this library."""
    low, high, lost = rowwise(), rowwise("softmax"), LINEAR
    times = {
        low: [{OWN: 3.0, "numpy": 2.0, "torch": 9.0}, {OWN: 2.5, "numpy": 1.8, "torch": 8.0}, {OWN: 1.5, "numpy": 2.0}],
        high: [{OWN: 1.0, "numpy": 2.0, "torch": 70.0}, {OWN: 1.1, "numpy": 2.5, "torch": 1.0}],
        lost: [{OWN: 2.0, "torch": 1.0}] * 4,
    }
    order = []

    def measured(problem, num_threads):
        order.append(problem)
        return Row(problem, times[problem].pop(0), 0.5)

    monkeypatch.setattr(measure, "measure", measured)
    rows = measure.measure_all([low, high, lost], 1, iter, [])
    assert order == [low, high, lost, low, high, lost, low, lost, lost]
    assert [found.seconds for found in rows] == [
        {OWN: 1.5, "numpy": 1.8, "torch": 8.0},
        {OWN: 1.0, "numpy": 2.0, "torch": 1.0},
        {OWN: 2.0, "torch": 1.0},
    ]


def test_a_problem_that_failed_is_not_tried_again(monkeypatch):
    attempts = []

    def measured(problem, num_threads):
        attempts.append(problem)
        raise timing.DisagreementError("numpy computes other values than ascend_grad")

    monkeypatch.setattr(measure, "measure", measured)
    failures: list[Failure] = []
    assert measure.measure_all([LINEAR], 1, iter, failures) == []
    assert attempts == [LINEAR]
    assert failures == [Failure(LINEAR.name, "numpy computes other values than ascend_grad")]


# ---- results and reports ---------------------------------------------------------------------------------------------


@pytest.fixture
def sample() -> GridResults:
    """Make results: NumPy takes 0.5, 0.95, 8 and 2 times as long as this library, torch 4, 1 and 0.25 times."""
    rows = [
        row(0.5, 4.0, **{stream.ORDINARY: 0.2, stream.NON_TEMPORAL: 0.1}),
        row(0.95, 1.0, rowwise(dtype="bfloat16", arrangement="transposed"), **{"numpy widened": 0.25}),
        row(8.0, None, rowwise("softmax", mode="fresh"), **{"numpy dot": 16.0}),
        row(2.0, 0.25, LINEAR, **{stream.ORDINARY: 0.2, rivals.PRODUCTS: 0.9}),
    ]
    return GridResults.of({"CPU": "an abacus"}, 2, 4, 7, rows, [Failure("x", "no")])


def test_results_survive_json(sample):
    text = sample.to_json()
    assert GridResults.from_json(text) == sample
    assert GridResults.from_json(text).to_json() == text
    assert [len(sample.rowwise), len(sample.linear)] == [3, 1]


def test_the_summary_counts_what_is_lost(sample):
    lines = {
        cells[0]: cells[1:]
        for line in tables.summary_block([sample]).splitlines()[2:]
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
    assert "seed 8" in tables.groups([sample, replace(sample, seed=8)])


def test_variants_have_a_table(sample):
    assert tables.variants_block([sample]).startswith("These results have no times of each variant")
    rows = [
        row(6.0, torch, replace(LINEAR, dtype=dtype), **{rivals.side_of("baseline"): 12.0, rivals.side_of("avx2"): 3.0})
        for dtype, torch in (("bfloat16", 24.0), ("bfloat16", 6.0), ("float16", None))
    ]
    lines = tables.variants_block([replace(sample, linear=rows)]).splitlines()[2:]
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
    assert first.case.name in tables.lost_block(sample.rows)
    at_the_limit = replace(first, seconds=first.seconds | {stream.ORDINARY: 0.9, stream.NON_TEMPORAL: 0.86})
    assert tables.lost_block([at_the_limit, *sample.rows[1:]]) == "None.\n"
    assert " 86 % * |" in tables.worst_block([at_the_limit], rivals.NUMPY)


def test_the_worst_come_first(sample):
    worst = tables.worst_block(sample.rows, rivals.TORCH, 2).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in worst] == [LINEAR.name, sample.rows[1].case.name]


def test_tables_are_rectangular(sample):
    for block in tables.blocks([sample]).values():
        assert len({line.count("|") for line in block.splitlines()}) == 1
        assert len({len(line) for line in block.splitlines()}) == 1


def test_the_overview_has_a_line_for_each_rival(sample):
    lines = tables.overview_block([sample]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[2:] == [
        ["row-wise, NumPy", "3", "1.56×", "67 %", "33 %"],
        ["row-wise, NumPy, widened", "1", "0.25×", "100 %", "100 %"],
        ["row-wise, torch", "2", "2.00×", "0 %", "0 %"],
        ["linear, NumPy", "1", "2.00×", "0 %", "0 %"],
        ["linear, torch", "1", "0.25×", "100 %", "100 %"],
    ]


def test_documents_have_a_place_for_every_block(sample):
    sources = Path(__file__).resolve().parents[2]
    text = "".join((sources / path.relative_to(documents.ROOT)).read_text() for path in documents.DOCUMENTS)
    contents = documents.grid_blocks([sample])
    assert {
        name: documents.filled(text, contents).count(content) for name, content in contents.items()
    } == dict.fromkeys(contents, 1)


def test_the_chart_is_the_same_for_the_same_results(sample, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        chart.chart([sample], tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", [[], ["linear"], ["softmax", WHOLE]])
def test_a_small_grid(operators, hasty, tmp_path, capsys):
    file = tmp_path / "grid.json"
    options = ["--operators", *operators] if operators else []
    arguments = ["--grid", "10", "--seed", "3", "--max-elements", "500", "--threads", "2", "--json", str(file)]
    assert main(["bench", *arguments, *options]) == 0
    found = GridResults.from_json(file.read_text())
    chosen = {"linear": problems.LINEAR}.get("".join(operators[:1]), operators) or problems.OPERATORS
    assert {row.case.operator for row in found.rows} == set(chosen)
    assert (found.count, found.seed, len(found.rows)) == (10, 3, 10)
    out = capsys.readouterr().out
    assert "with 2 threads" in out
    assert all(row.case.name in out for row in found.rows)


def test_a_grid_with_a_picture(hasty, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.svg"
    assert main(["bench", "--grid", "2", "--max-elements", "50", "--plot", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")


def test_wrong_values_are_a_failure(hasty, monkeypatch, tmp_path, capsys):
    def wrong(*args, right=ag.softmax, **kwargs):
        result = right(*args, **kwargs)
        result[...] += 1
        return result

    monkeypatch.setattr(ag, "softmax", wrong)
    file = tmp_path / "grid.json"
    operators = ["--operators", "softmax", "log_softmax"]
    assert main(["bench", "--grid", "2", "--max-elements", "50", *operators, "--json", str(file)]) == 1
    (failure,) = GridResults.from_json(file.read_text()).failures
    assert failure.error == "numpy computes other values than ascend_grad"
    assert f"failed: {failure.case}" in capsys.readouterr().err


def test_results_are_kept_with_the_sources(hasty, monkeypatch, tmp_path):
    document = tmp_path / "benchmark.md"
    document.write_text("<!-- bench:grid_summary:begin -->\n<!-- bench:grid_summary:end -->\n")
    monkeypatch.setattr(documents, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(problems, "MAX_ELEMENTS", 50)
    for seed in ("0", "1", "1"):
        assert main(["bench", "--grid", "2", "--seed", seed, "--update-readme"]) == 0
    assert [grid.seed for grid in documents.kept_grids()] == [0, 1]
    assert "| seed 1 " in document.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "--seed is for random problems"),
        (["--max-elements", "9"], "--max-elements is for random problems"),
        (["--grid", "0"], "--grid takes a count from 1 on"),
        (["--grid", "9", "--linear"], "--grid draws its own problems"),
        (
            ["--grid", "9", "--operators", "sigmoid"],
            "--operators: sigmoid is none of rowwise, linear, softmax_backward",
        ),
        (["--grid", "9", "--filter", "nothing like it"], "no problem contains 'nothing like it'"),
        (["--grid", "9", "--operators", "softmax", "--update-readme"], "takes a full grid"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
