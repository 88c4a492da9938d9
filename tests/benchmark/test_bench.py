"""Test the benchmark on tiny cases, from operands to tables. No test depends on the speed of the machine."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from processes import start
from samples import DTYPES, OPERATORS

import ascend_grad as ag
from ascend_grad.bench import (
    accuracy,
    arrays,
    cases,
    charts,
    documents,
    frameworks,
    machine,
    measure,
    pictures,
    report,
    results,
    sides,
    targets,
)
from ascend_grad.bench.case import BACKWARD, FORWARD, MASKED, Case
from ascend_grad.bench.measure import DisagreementError, Repeats
from ascend_grad.bench.parallel.measure import ParallelResults
from ascend_grad.bench.results import STREAM, Results, Row, Worst
from ascend_grad.bench.sides import linear, rowwise
from ascend_grad.cli.main import main

#: The folder of the sources, which have the documents and results. The tests run against an installed package.
SOURCES = Path(__file__).resolve().parents[2]


def small_case(operator: str, dtype: str = "float32", mode: str = "out") -> Case:
    shape = (2, 3, 4, 5) if operator in MASKED else (3, 4, 5)
    return Case(operator, dtype, shape, mode, len(shape) - 1)


@pytest.fixture
def sample() -> Results:
    """Make invented results, some of them good and some bad."""
    rows = [
        Row(
            Case(operator, "float32", shape, mode, dim),
            {"ascend_grad": 1e-3, "numpy": 5e-3, "torch": 2e-3 if dim else 0.5e-3, "stream": 0.95e-3},
        )
        for operator in BACKWARD
        for shape, dim in (((4096, 4096), 1), ((4096, 4096), 0), ((8, 8), 1))
        for mode in ("out", "fresh")
    ]
    worst = Worst("softmax", "float32", "baseline", 0.4, "constants", 100)
    return Results({"CPU": "an abacus"}, 2, {"speed": rows, "accuracy": [worst]})


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "choice", [cases.speed, cases.linear, cases.tensors, cases.logits, cases.drawn, cases.relative]
)
def test_names_of_cases_are_unique(choice, quick, hasty):
    names = [case.name for case in choice(quick)]
    assert len(set(names)) == len(names)


def test_every_operator_dtype_and_axis_is_measured():
    full = cases.speed()
    assert set(cases.speed(quick=True)) <= set(full)
    assert {case.operator for case in full} == set(OPERATORS)
    assert {case.dtype for case in full} == set(DTYPES)
    assert {(len(case.shape), case.dim) for case in full} == {(2, 0), (2, 1), (3, 1), (4, 3)}


@pytest.mark.parametrize("mode", ["out", "fresh", "idle"])
def test_operands_fit_the_case(operator, dtype, mode):
    case = small_case(operator, dtype, mode)
    inputs, out, _ = arrays.operands(case)
    floats = [a for a in inputs if a.dtype != bool]
    assert {a.dtype for a in (*floats, out)} == {DTYPES[dtype]}
    assert {a.shape for a in (*floats, out)} == {case.shape}
    assert case.nbytes == out.nbytes


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["out", "fresh", "idle"])
def test_sides_agree_and_are_timed(operator, dtype, mode, hasty):
    if mode == "fresh" and operator not in BACKWARD:
        return
    row = measure.measure(small_case(operator, dtype, mode), 1)
    expected = {"ascend_grad", "numpy"} | ({"numpy dot"} if operator == "softmax_backward" else set())
    assert set(row.seconds) == expected
    assert all(seconds > 0 for seconds in row.seconds.values())


@pytest.mark.parametrize("name", [*BACKWARD, *FORWARD])
def test_the_backend_is_called_directly_beside_small_calls(name, dtype, hasty):
    row = measure.measure(Case(name, dtype, (8, 8), "out", 1), 1)
    assert row.seconds["direct"] > 0
    (target,) = [target for target in targets.rowwise_targets([row]) if target.text.startswith("dispatch")]
    assert target.met is not None


def test_the_stream_is_timed_beside_larger_arrays(dtype, hasty):
    size = sides.SMALLEST_STREAM // DTYPES[dtype].itemsize
    row = measure.measure(Case("softmax", dtype, (1, size), "out", 1), 2)
    assert {*STREAM} < set(row.seconds)
    assert row.speedup(*STREAM) > 0


@pytest.mark.parametrize("step", [0, 1])
def test_a_rival_with_other_values_is_refused(step, monkeypatch, hasty):
    """A rival with other values is refused, also one that does nothing and leaves the previous side's result."""

    def wrong(case, operands):
        return lambda: np.add(operands.out, step)

    monkeypatch.setitem(rowwise.SIDES, "wrong", wrong)
    with pytest.warns(UserWarning, match=r"softmax float32 3 × 4 × 5 out: wrong computes other values"):
        row = measure.measure(small_case("softmax"), 1)
    assert "numpy" in row.seconds
    assert "wrong" not in row.seconds
    monkeypatch.setitem(rowwise.SIDES, "numpy", wrong)
    with pytest.raises(DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
        measure.measure(small_case("softmax"), 1)


@pytest.mark.parametrize(
    "agree",
    [frameworks.agree, lambda got, expected, dtype: linear.agree([got], [expected], dtype)],
    ids=["row-wise", "linear"],
)
@pytest.mark.parametrize("dtype_of", list(DTYPES))
def test_agreement_is_up_to_rounding(dtype_of, agree):
    values = np.linspace(-1, 1, 1000).astype(DTYPES[dtype_of])
    one_step = (
        np.nextafter(values, values.dtype.type(2)) if dtype_of != "bfloat16" else values * values.dtype.type(1.01)
    )
    assert agree(one_step, values, dtype_of)
    assert not agree(values * values.dtype.type(1.25), values, dtype_of)
    assert not agree(np.full_like(values, np.nan), values, dtype_of)
    assert not agree(values[1:], values, dtype_of)
    smallest = np.full(10, ml_dtypes.finfo(values.dtype).smallest_subnormal, values.dtype)
    assert agree(smallest + smallest, smallest, dtype_of)
    assert not agree(smallest * values.dtype.type(3), smallest, dtype_of)


def test_settings_are_restored(hasty):
    before = ag.get_num_threads()
    measure.measure(small_case("softmax"), 3)
    assert ag.get_num_threads() == before
    assert gc.isenabled()


@pytest.mark.parametrize("count", [1, 2])
def test_the_threads_of_blas_are_limited_and_restored(count):
    def threads_of_blas() -> set[int]:
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    with threadpoolctl.threadpool_limits(2, "blas"):
        assert threads_of_blas() == {2}
        with frameworks.threads(count):
            assert threads_of_blas() == {count}
        assert threads_of_blas() == {2}


def test_what_others_take_is_measured(hasty, monkeypatch):
    clock = iter([0, 1000])
    monkeypatch.setattr(measure, "seconds_of_others", lambda: next(clock))
    assert measure.measure(small_case("softmax"), 1).others > 0
    assert next(clock, None) is None


def test_cases_that_came_out_low_are_measured_again(monkeypatch):
    """Cases that others disturbed, or in which a rival was faster, have another attempt after all others.

    Each side keeps its best time, so that rivals profit as much as this library.
    """
    monkeypatch.setattr(measure, "RANDOM_REPEATS", Repeats(3, 2, 4))
    low, high, lost, disturbed = (replace(small_case(name), suite="random") for name in (*FORWARD, *BACKWARD))
    named = small_case(MASKED[0])
    attempts = {
        low: [
            {"ascend_grad": 3.0, "numpy": 2.0, "torch": 9.0},
            {"ascend_grad": 2.5, "numpy": 1.8},
            {"ascend_grad": 1.5},
        ],
        high: [{"ascend_grad": 1.0, "numpy": 2.0, "torch": 70.0}, {"ascend_grad": 1.1, "numpy": 2.5, "torch": 1.0}],
        lost: [{"ascend_grad": 2.0, "torch": 1.0}] * 4,
        disturbed: [{"ascend_grad": 1.0}] * 3,
        named: [{"ascend_grad": 1.0}],
    }
    others, order = {disturbed: iter((0.5, 0.4, 0.05))}, []

    def measured(case, num_threads):
        order.append(case)
        return Row(case, attempts[case].pop(0), next(others.get(case, iter([0.0]))))

    monkeypatch.setattr(measure, "measure", measured)
    rows = measure.measure_all([low, high, lost, disturbed, named], 1, iter, [])
    first = [low, high, lost, disturbed]
    assert order == [*first, named, *first, low, lost, disturbed, lost]
    assert [row.seconds for row in rows] == [
        {"ascend_grad": 1.5, "numpy": 1.8, "torch": 9.0},
        {"ascend_grad": 1.0, "numpy": 2.0, "torch": 1.0},
        *({"ascend_grad": 2.0, "torch": 1.0}, {"ascend_grad": 1.0}, {"ascend_grad": 1.0}),
    ]
    assert [row.others for row in rows] == [0.0, 0.0, 0.0, 0.05, 0.0]


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_errors_are_within_their_bounds(operator, dtype, monkeypatch):
    monkeypatch.setattr(accuracy, "LENGTHS", (1, 3, 17))
    found = accuracy.measure(operator, dtype)
    assert {worst.variant for worst in found} == set(ag.show_config(mode="dict")["cpu"]["supported"])
    assert max(worst.error for worst in found) <= 1


def test_wrong_results_exceed_their_bounds(operator, dtype):
    _, inputs = accuracy.samples(operator, 17, dtype)
    expected = accuracy.expected_rows(operator, inputs)
    right = getattr(ag, operator)(*inputs, accuracy.SCALE if operator in MASKED else -1)
    assert accuracy.errors(right, expected).max() <= 1
    assert accuracy.errors(right * right.dtype.type(1.02), expected).max() > 1
    assert np.isinf(accuracy.errors(np.full_like(right, np.nan), expected)).any()


# ---- results and reports ---------------------------------------------------------------------------------------------


def test_targets_tell_what_is_met(sample):
    found = {target.text: target for target in targets.rowwise_targets(sample["speed"])}
    lost = found["with `out=`, every case, against torch"]
    assert (lost.met, lost.required) == (False, "≥ 0.95×")
    assert lost.measured == "0.5× (softmax_backward float32, 4096 × 4096, dim 0); 2 of 6 below"
    assert found["large float32, last dim, share of the stream"].met is True
    assert found["float64, against torch"].met is None
    assert targets.accuracy_targets(sample["accuracy"])[0].met is True
    assert "**NOT met**" in targets.targets_block(found.values())


def test_losses_are_shown(sample):
    lost = report.rowwise_lost(sample["speed"])
    assert lost.count("dim 0") == lost.count("_backward") == 4
    assert report.rowwise_lost([row for row in sample["speed"] if row.case.dim == 1]) == "None.\n"


def test_blocks_are_replaced_and_nothing_else(sample):
    contents = documents.blocks({"speed": sample, "accuracy": sample})
    document = "".join(
        f"about {name}\n<!-- bench:{name}:begin -->\nold\n<!-- bench:{name}:end -->\n" for name in contents
    )
    document += "<!-- bench:unknown:begin -->\nkept\n<!-- bench:unknown:end -->\n"
    once = documents.filled(document, contents)
    assert "old" not in once
    assert "kept" in once
    assert all(f"about {name}" in once and content in once for name, content in contents.items())
    assert documents.filled(once, contents) == once


@pytest.fixture
def contents(monkeypatch) -> dict[str, str]:
    """Make the blocks of the results that are kept with the sources."""
    monkeypatch.setattr(documents, "FOLDER", SOURCES / "bench" / "results")
    return documents.contents_of_documents()


def test_documents_show_the_results_that_are_kept_with_the_sources(contents):
    """The documents show the stored results. ``python -m ascend_grad.bench`` updates them after a measurement."""
    assert {"rows", "accuracy", "linear_rows", "tensors_calls", "loss_rows", "grid_lost"} < set(contents)
    text = "".join(path.read_text() for path in documents.documents_below(SOURCES))
    assert documents.filled(text, contents) == text
    assert {name: text.count(f"<!-- bench:{name}:begin -->") for name in contents} == dict.fromkeys(contents, 1)


def test_tables_are_rectangular(contents):
    for block in contents.values():
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
        assert len({len(line) for line in lines}) <= 1


@pytest.mark.parametrize("path", sorted((SOURCES / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_survive_json(path):
    text = path.read_text()
    found = (ParallelResults if path.stem == "parallel" else Results).from_json(text)
    assert len(found.rows) > 7 or found["accuracy"] or found["memory"]
    assert found.to_json() == text


def test_the_documents_show_every_picture_and_no_others():
    text = "".join(path.read_text() for path in (SOURCES / "README.md", *(SOURCES / "docs").rglob("*.md")))
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert all("pictures/" in path for path in shown)
    assert {Path(path).stem for path in shown} == set(pictures.DRAWN)


def test_the_chart_is_the_same_for_the_same_results(sample, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        charts.speed_chart(sample["speed"], tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_time_of_others_does_not_grow_by_our_own_work():
    before = machine.seconds_of_others()
    sum(i for i in range(1_000_000))
    assert machine.seconds_of_others() >= before - 0.1


def test_the_machine_is_described_without_naming_it():
    description = machine.describe()
    assert {"CPU", "cores", "variant", "BLAS", "numpy"} <= set(description)
    assert os.uname().nodename not in " ".join(description.values()).split()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_quick_run_in_this_process(hasty, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "speed", lambda quick: [small_case(operator) for operator in OPERATORS])
    file = tmp_path / "results.json"
    assert main(["bench", "--quick", "--filter", "softmax_backward", "--threads", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "with 2 threads" in out
    assert "log_softmax_backward float32 3 × 4 × 5 out" in out
    assert {row.case.operator for row in Results.from_json(file.read_text())["speed"]} == {*OPERATORS[:3]}


def test_cases_that_fail_leave_the_others(hasty, monkeypatch, tmp_path, capsys):
    """Rows of the failed cases are printed and written, the failure is named, and the exit status reports it."""

    def numpy(case, operands, right=rowwise.SIDES["numpy"]):
        call = right(case, operands)
        return (lambda: call() + 1) if case.operator == "log_softmax" else call

    def softmax(*args, **kwargs):
        raise ag.AclError("aclnnSoftmax failed", code=507015)

    def log_softmax_backward(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(rowwise.SIDES, "numpy", numpy)
    monkeypatch.setattr(ag, "softmax", softmax)
    monkeypatch.setattr(ag, "log_softmax_backward", log_softmax_backward)
    monkeypatch.setattr(cases, "speed", lambda quick: [small_case(operator) for operator in OPERATORS])
    file = tmp_path / "results.json"
    assert main(["bench", "--quick", "--json", str(file)]) == 1
    out, err = capsys.readouterr()
    failed = {
        "log_softmax_backward float32 3 × 4 × 5 out": "RuntimeError: out of luck",
        "softmax float32 3 × 4 × 5 out": "aclnnSoftmax failed [507015 ACL_ERROR_RT_AICORE_EXCEPTION]",
        "log_softmax float32 3 × 4 × 5 out": "numpy computes other values than ascend_grad",
    }
    found = Results.from_json(file.read_text())
    assert {failure.case: failure.error for failure in found["failures"]} == failed
    assert Results.from_json(found.to_json()) == found
    measured = [row.case.name for row in found["speed"]]
    assert sorted([*measured, *failed]) == sorted(case.name for case in cases.speed(True))
    assert all(f"| {name} " in out for name in measured)
    assert not any(f"| {name} " in out for name in failed)
    for name, error in failed.items():
        assert f"ascend-grad bench: failed: {name}: {error}\n" in err


def test_a_case_that_failed_is_not_tried_again(monkeypatch):
    """A failed case is not measured again, and its earlier measurement is not lost."""
    attempts = []

    def measured(case, num_threads):
        attempts.append(case)
        if len(attempts) != 1:
            raise MemoryError("no more")
        return Row(case, {"ascend_grad": 1.0}, 5.0)

    monkeypatch.setattr(measure, "measure", measured)
    first, second = small_case("softmax"), small_case("log_softmax")
    failures = []
    (row,) = measure.measure_all([first, second], 1, iter, failures)
    assert (row.case, row.own) == (first, 1.0)
    assert attempts == [first, second, first]
    assert [(failure.case, failure.error) for failure in failures] == [
        (second.name, "MemoryError: no more"),
        (first.name, "MemoryError: no more"),
    ]


def test_failed_measurements_of_errors(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(accuracy, "LENGTHS", (3,))

    def measured(operator, dtype, right=accuracy.measure):
        if operator == "softmax":
            raise FloatingPointError("overflow")
        return right(operator, dtype)

    monkeypatch.setattr(accuracy, "measure", measured)
    file = tmp_path / "results.json"
    assert main(["bench", "accuracy", "--filter", "softmax float16", "--json", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "| scaled_masked_softmax float16" in out
    assert "failed: softmax float16: FloatingPointError: overflow\n" in err
    found = Results.from_json(file.read_text())
    assert {worst.operator for worst in found["accuracy"]} == {"log_softmax", "scaled_masked_softmax"}


def test_the_last_lines_count_wins_and_list_losses(hasty, monkeypatch, capsys):
    chosen = [small_case("softmax"), small_case("log_softmax")]
    monkeypatch.setattr(cases, "speed", lambda quick: chosen)
    seconds = [{results.OWN: 1.0, "numpy": 4.0, "numpy dot": 3.0}, {results.OWN: 4.0, "numpy": 2.0}]
    rows = [Row(case, each) for case, each in zip(chosen, seconds)]
    monkeypatch.setattr(measure, "measure_all", lambda *_: rows)
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert "| required" not in out
    assert out.endswith(
        "Faster than NumPy in 1 of 2 cases; NumPy takes 1.22× as long (geometric mean). Slower in 1:\n"
        f"  0.50×  {chosen[1].name}\n"
    )
    assert main(["bench", "--targets"]) == 0
    assert "| required" in capsys.readouterr().out


def test_documents_are_not_updated_by_halves(hasty, monkeypatch, tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text("old")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(documents, "FOLDER", tmp_path)

    def softmax(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr(ag, "softmax", softmax)
    monkeypatch.setattr(cases, "speed", lambda quick: [small_case("softmax"), small_case("log_softmax")])
    assert main(["bench", "--update-readme"]) == 1
    assert document.read_text() == "old"
    assert not (tmp_path / "speed.json").exists()
    assert "the documents are not updated" in capsys.readouterr().err


def test_accuracy_decides_the_status(monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "LENGTHS", (3,))
    assert main(["bench", "accuracy", "--filter", "float16", "--filter", "log"]) == 0
    assert "log_softmax_backward float16" in capsys.readouterr().out
    monkeypatch.setattr(accuracy, "measure", lambda *pair: [Worst(*pair, "avx2", 1.5, "constants", 3)])
    assert main(["bench", "accuracy"]) == 1
    assert "**NOT met**" in capsys.readouterr().out


def test_the_documents_can_be_updated(hasty, monkeypatch, tmp_path):
    document = tmp_path / "README.md"
    document.write_text("# Title\n<!-- bench:rows:begin -->\n<!-- bench:rows:end -->\n")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(documents, "FOLDER", tmp_path)
    monkeypatch.setattr(cases, "speed", lambda quick: [small_case("softmax")])
    assert main(["bench", "--update-readme"]) == 0
    assert "| softmax float32 3 × 4 × 5 out" in document.read_text()
    assert [path.name for path in tmp_path.glob("*.json")] == ["speed.json"]


def test_the_command_with_all_rivals_that_are_installed(monkeypatch, tmp_path):
    """The command runs in a separate process, as PyTorch and JAX start threads."""
    monkeypatch.chdir(tmp_path)
    name = "log_softmax_backward float32 8 × 8 fresh"
    process = start("bench", "--filter", name, "--json", "results.json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert name in out
    found = Results.from_json((tmp_path / "results.json").read_text())
    assert [row.case.name for row in found["speed"]] == [name]
    assert set(found["speed"][0].seconds) >= {results.OWN, "numpy"}


def test_without_an_installed_package(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "ascend_grad.bench")
    assert main(["bench", "--quick"]) == 2
    assert "needs the package to be installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "nothing like it"], "no case contains 'nothing like it'"),
        (["accuracy", "--filter", "int8"], "no operator and dtype contain 'int8'"),
        (["accuracy", "--quick"], "--quick is an option of bench rowwise, bench linear, bench torch"),
        (["accuracy", "--plot", "x.svg"], "--plot is an option of bench rowwise, bench random, not of bench accuracy"),
        (["accuracy", "--update-readme", "--filter", "fresh"], "needs a full run"),
        (["--threads", "0"], "expected None or an int"),
        (["--json", "absent/results.json"], "--json absent/results.json: cannot write in absent"),
        (["--json", "."], "--json .: is a directory"),
        (["linear", "--filter", "nothing like it"], "no case contains 'nothing like it'"),
        (["linear", "--update-readme", "--quick"], "needs a full run"),
        (["losses", "--filter", "nothing like it"], "no case contains 'nothing like it'"),
        (["losses", "--count", "9"], "--count is an option of bench random, not of bench losses"),
        (["--seed", "0"], "--seed is an option of bench random, not of bench rowwise"),
        (["--few-classes"], "--few-classes is an option of bench random"),
        (["random", "--quick"], "not of bench random"),
        (["random", "--count", "0"], "--count: expected a number of at least 1, got 0"),
        (["random", "--seed", "-1"], "--seed: expected a number of at least 0, got -1"),
        (["random", "--max-elements", "0"], "--max-elements: expected a number of at least 4"),
        (["random", "--max-rows", "0"], "--max-rows: expected a number of at least 1"),
        (["random", "--layouts", "plain", "--update-readme"], "needs all random problems, without --layouts"),
        (["random", "--operators", "sigmoid"], "--operators: expected some of rowwise, linear, softmax_backward"),
        (["random", "--filter", "nothing like it"], "no problem contains 'nothing like it'"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["speed", "speed.txt", "absent/speed.svg"])
def test_a_plot_that_cannot_be_written_is_refused_first(name, monkeypatch, tmp_path, capsys):
    """A plot that cannot be written is refused before the measurement.

    A name without a suffix is refused, too, as matplotlib would add a suffix and write another file.
    """
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measure, "measure_all", lambda *_: pytest.fail("this was measured"))
    assert main(["bench", "--plot", str(tmp_path / name)]) == 2
    assert "ascend-grad bench: error: --plot " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_plot_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "matplotlib")
    assert main(["bench", "--plot", "x.svg"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
