"""Test the benchmark of losses on tiny cases, from arguments to tables. No test depends on the speed of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cross_entropy_oracles import expected
from samples import DTYPES

import ascend_grad as ag
from ascend_grad.bench import documents, frameworks
from ascend_grad.bench import measure as timing
from ascend_grad.bench.grid import layouts, losses
from ascend_grad.bench.grid import measure as grid_measure
from ascend_grad.bench.grid.problems import CROSS_ENTROPY, IN_PLACE, RowwiseProblem
from ascend_grad.bench.grid.rivals import compared, operands
from ascend_grad.bench.linear import measure as linear_measure
from ascend_grad.bench.linear.cases import FIRST, WHOLE
from ascend_grad.bench.losses import cases, measure, report, rivals
from ascend_grad.bench.losses.cases import COMPILED, JAX, PLAIN, STATISTICS, TOP_K, RelativeCase
from ascend_grad.bench.losses.results import LossResults
from ascend_grad.bench.losses.targets import speed_targets
from ascend_grad.bench.results import OWN, Failure, Row
from ascend_grad.cli.main import main

SHAPE = (5, 130, 3)
LINEAR = [
    *(RelativeCase(WHOLE, mode, "float32", SHAPE) for mode in (*cases.MODES, *cases.OUTPUTS)),
    *(RelativeCase(TOP_K, mode, "float32", SHAPE) for mode in cases.TOP_K_MODES),
]


@pytest.fixture(autouse=True)
def _without_optional_packages(monkeypatch):
    """Leave out PyTorch and JAX, whose settings the benchmark changes for the whole process."""
    monkeypatch.setattr(frameworks, "module", lambda name: None)


@pytest.fixture
def hasty(monkeypatch):
    """Make turns a few microseconds long."""
    monkeypatch.setattr(timing, "WARM_UP", 1e-6)
    for name in ("TURN", "LOOP", "PAUSE"):
        monkeypatch.setattr(grid_measure, name, 1e-6)
    for room in (grid_measure, linear_measure):
        monkeypatch.setattr(room, "TURNS", 2)
    monkeypatch.setattr(linear_measure, "LOOP", 1e-6)
    monkeypatch.setattr(linear_measure, "PAUSE", 0)


def problem(
    shape: tuple[int, ...] = (6, 10), dim: int = 1, dtype: str = "float32", options: str = "", mode: str = "fresh"
) -> RowwiseProblem:
    order = layouts.C_ORDER
    return RowwiseProblem(CROSS_ENTROPY, dtype, shape, dim, mode, order, order, dtype, options)


@pytest.fixture
def sample() -> LossResults:
    """Make results in which torch takes twice as long for small vocabularies, and four times for large ones.

    NumPy takes five times as long, and the other calls for a linear layer as long as ours.
    """

    def seconds(case: RowwiseProblem) -> dict[str, float]:
        return {OWN: 1e-3, "numpy": 5e-3, "torch": 4e-3 if case.shape[case.dim] >= 32000 else 2e-3}

    compiled = RelativeCase(JAX, COMPILED, "float32", FIRST)
    relative = dict.fromkeys([*cases.linear(), compiled])
    return LossResults(
        {"CPU": "an abacus"},
        2,
        [Row(case, seconds(case)) for case in cases.logits()],
        [Row(case, seconds(case)) for case in cases.drawn()],
        [Row(case, {OWN: 1.0, case.other: 1.0}) for case in relative],
        [Failure("x", "no")],
    )


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_cases_are_named_uniquely():
    names = [case.name for case in (*cases.logits(), *cases.drawn(), *cases.linear())]
    assert len(set(names)) == len(names)
    assert set(cases.quick_logits()) <= set(cases.logits())


def test_everything_is_measured():
    named, drawn = cases.logits(), cases.drawn()
    assert {case.dtype for case in named} == {case.dtype for case in drawn} == set(DTYPES)
    assert {case.options for case in named} == {"", *losses.OPTIONS}
    assert {case.mode for case in named} == {"fresh", "out"}
    assert {case.operator for case in drawn} == {CROSS_ENTROPY}
    assert {case.dim == len(case.shape) - 1 for case in drawn} == {True, False}
    assert any(case.shape[case.dim] >= 32000 for case in drawn)


# ---- the loss of logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", *losses.OPTIONS])
@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_numpy_computes_the_definition(options, shape, dim, mode, hasty):
    """The formula is compared with the definition in extended precision, and not only with this library."""
    case = problem(shape, dim, "float64", options, mode)
    comparison = compared(case, 1)
    (x,), out = operands(case)
    target, settings = losses.option(options, shape, dim, "float64")
    right = expected(x.copy(), target, dim, **settings)
    comparison.reset()
    loss, gradient = comparison.calls["numpy"]()
    np.testing.assert_allclose(loss, right["loss"].astype(float), rtol=1e-12)
    np.testing.assert_allclose(gradient, right["input_grad"].astype(float), rtol=1e-11, atol=1e-14)
    assert gradient.shape == out.shape


@pytest.mark.parametrize("options", ["", *losses.OPTIONS])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_sides_agree_and_are_timed(options, mode, dtype, hasty):
    row = grid_measure.measure(problem((2, 9, 5), 1, dtype, options, mode), 1)
    assert {OWN, "numpy"} <= set(row.seconds)
    assert ("numpy widened" in row.seconds) == (DTYPES[dtype].itemsize == 2)


def test_options_are_different():
    """Each option changes the loss of the plain call, and its targets or arguments are what its name says."""
    found = {name: losses.option(name, (200, 20), 1, "float32") for name in ("", *losses.OPTIONS)}
    x = np.random.default_rng(0).standard_normal((200, 20), np.float32)
    values = {float(ag.cross_entropy(x, target, **settings).loss) for target, settings in found.values()}
    assert len(values) == len(found)
    ignored, _ = found[losses.IGNORED]
    assert 0.3 < np.mean(ignored == losses.IGNORE_INDEX) < 0.7
    several, settings = found[losses.SEVERAL_TARGETS]
    assert all(len(set(row)) == losses.TARGETS for row in several.tolist())
    np.testing.assert_allclose(settings["target_prob"].sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_a_side_with_another_loss_or_gradient_is_refused(part, monkeypatch, hasty):
    def wrong(problem, operands, right=losses.numpy_formula):
        call = right(problem, operands)
        return lambda: tuple(value + (0.01 if i == part else 0) for i, value in enumerate(call()))

    monkeypatch.setattr(losses, "numpy_formula", wrong)
    with pytest.raises(timing.DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
        grid_measure.measure(problem((6, 10), dtype="float64"), 1)


# ---- calls for a linear layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_a_linear_case_is_measured(case, hasty):
    row = measure.measure(case, 1)
    assert set(row.seconds) == {OWN, PLAIN if case.operator == WHOLE else STATISTICS}
    assert all(seconds > 0 for seconds in row.seconds.values())


@pytest.mark.parametrize("mode", cases.MODES)
def test_options_change_the_linear_loss(mode):
    prepared = rivals.pair(RelativeCase(WHOLE, mode, "float64", SHAPE))
    assert abs(prepared.own().loss - prepared.other().loss) > 1e-4


@pytest.mark.parametrize("mode", cases.OUTPUTS)
def test_outputs_are_further_fields(mode):
    prepared = rivals.pair(RelativeCase(WHOLE, mode, "float32", SHAPE))
    assert prepared.own()._fields[3:] == (mode,)


def test_another_result_of_the_other_call_is_refused(monkeypatch, hasty):
    def wrong(*args, right=ag.linear_top_k, **kwargs):
        found = right(*args, **kwargs)
        return found._replace(log_prob=found.log_prob + np.float32(0.01))

    monkeypatch.setattr(ag, "linear_top_k", wrong)
    with pytest.raises(timing.DisagreementError, match=r"^statistics computes other values than linear_top_k$"):
        measure.measure(RelativeCase(TOP_K, "k = 16", "float32", SHAPE), 1)


def test_jax_is_left_out_where_it_is_not_installed():
    assert JAX not in {case.operator for case in cases.linear()}
    assert JAX not in {case.operator for case in cases.quick_linear()}


# ---- results, targets, tables ----------------------------------------------------------------------------------------


def test_results_survive_json(sample):
    text = sample.to_json()
    assert json.loads(text)["machine"] == {"CPU": "an abacus"}
    assert LossResults.from_json(text) == sample
    assert LossResults.from_json(text).to_json() == text


def test_targets_tell_what_is_met(sample):
    assert [target.met for target in speed_targets(sample)] == [True] * 8
    nothing = LossResults({}, 1)
    assert [(target.met, target.measured) for target in speed_targets(nothing)] == [(None, "–")] * 8

    def slower(rows, condition, factor):
        return [
            replace(row, seconds=row.seconds | {OWN: factor * row.own}) if condition(row.case) else row for row in rows
        ]

    large = replace(sample, logits=slower(sample.logits, lambda case: case.shape == (512, 50257), 1.5))
    found = speed_targets(large)
    assert [target.met for target in found] == [True, True, False, *[True] * 5]
    assert found[2].measured.startswith("2.667× (cross_entropy float32 (512, 50257) dim 1, C order, fresh); 4 of ")
    small = next(row.case for row in sample.drawn if row.case.shape[row.case.dim] < 32000)
    drawn = replace(sample, drawn=slower(sample.drawn, lambda case: case == small, 6))
    assert [target.met for target in speed_targets(drawn)][:4] == [True, False, True, False]
    linear = replace(sample, linear=slower(sample.linear, lambda case: case.dtype == "float32", 1.08))
    assert [target.met for target in speed_targets(linear)][4:] == [True, False, True, False]
    bfloat16 = replace(sample, linear=slower(sample.linear, lambda case: case.dtype == "bfloat16", 9))
    assert [target.met for target in speed_targets(bfloat16)] == [True] * 8


def test_losses_are_shown(sample):
    assert report.lost_block(sample.logits) == "None.\n"
    first = sample.logits[0]
    lost = replace(first, seconds=first.seconds | {"torch": 0.5e-3})
    assert report.lost_block([lost, *sample.logits[1:]]).count("cross_entropy") == 1
    assert " 0.50× " in report.lost_block([lost])


def test_tables_are_rectangular(sample):
    blocks = documents.loss_blocks(sample)
    assert {*report.CAPTIONS, "loss_machine", "loss_targets"} == set(blocks)
    for name in blocks:
        lines = [line for line in blocks[name].splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
        assert len({len(line) for line in lines}) <= 1
    assert blocks["loss_linear"].count(" 100 % |") == len(sample.linear)
    assert set(documents.loss_blocks(replace(sample, drawn=[], linear=[]))) == {
        "loss_machine",
        "loss_targets",
        "loss_rows",
        "loss_lost",
    }


def test_documents_have_a_place_for_every_block(sample):
    sources = Path(__file__).resolve().parents[2]
    text = "".join((sources / path.relative_to(documents.ROOT)).read_text() for path in documents.DOCUMENTS)
    contents = documents.loss_blocks(sample)
    assert {name: documents.filled(text, contents).count(content) for name, content in contents.items()} == (
        dict.fromkeys(contents, 1)
    )


def test_without_results_there_are_no_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "LOSSES_FILE", tmp_path / "losses.json")
    assert documents.kept_loss_blocks() == {}


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Make the command's cases small."""
    monkeypatch.setattr(cases, "logits", lambda: [problem(), problem((2, 9, 3), 1, options=losses.SMOOTHING)])
    monkeypatch.setattr(cases, "drawn", lambda: [replace(problem((4, 7)), arrangement="every second")])
    monkeypatch.setattr(cases, "linear", lambda: LINEAR)


def test_the_command(hasty, small, monkeypatch, tmp_path, capsys):
    document = tmp_path / "losses.md"
    document.write_text("<!-- bench:loss_linear:begin -->\n<!-- bench:loss_linear:end -->\n")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(documents, "LOSSES_FILE", tmp_path / "losses.json")
    file = tmp_path / "results.json"
    assert main(["bench", "--losses", "--threads", "2", "--json", str(file), "--update-readme"]) == 0
    found = LossResults.from_json(file.read_text())
    assert documents.LOSSES_FILE.read_text() == file.read_text()
    assert [row.case for row in found.logits] == cases.logits()
    assert [row.case for row in found.drawn] == cases.drawn()
    assert [row.case for row in found.linear] == LINEAR
    assert "variant" in found.machine
    out = capsys.readouterr().out
    assert "with 2 threads" in out
    assert all(row.case.name in out for row in (*found.logits, *found.linear))
    assert "| linear_top_k k = 16 float32 5 × 130 × 3 " in document.read_text()


def test_a_choice_of_cases(hasty, small, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert main(["bench", "--losses", "--filter", "smoothing", "--json", str(file)]) == 0
    found = LossResults.from_json(file.read_text())
    assert [row.case.name for row in found.rows] == [
        "cross_entropy with smoothing float32 (2, 9, 3) dim 1, C order, fresh",
        *(case.name for case in LINEAR if "smoothing" in case.mode),
    ]
    assert "linear_top_k" not in capsys.readouterr().out


def test_cases_that_fail_leave_the_others(hasty, small, monkeypatch, tmp_path, capsys):
    def fails(*args, **kwargs):
        raise MemoryError("1 TiB")

    monkeypatch.setattr(ag, "linear_top_k", fails)
    monkeypatch.setattr(documents, "DOCUMENTS", (tmp_path / "README.md",))
    monkeypatch.setattr(documents, "LOSSES_FILE", tmp_path / "losses.json")
    (tmp_path / "README.md").write_text("old")
    assert main(["bench", "--losses", "--update-readme"]) == 1
    out, err = capsys.readouterr()
    for case in LINEAR:
        assert (case.name in out) == (case.operator != TOP_K)
        assert (f"failed: {case.name}: MemoryError: 1 TiB\n" in err) == (case.operator == TOP_K)
    assert "the documents stay as they are" in err
    assert not documents.LOSSES_FILE.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "nothing like it"], "no case contains 'nothing like it'"),
        (["--linear"], "without --linear and --torch"),
        (["--torch"], "without --linear and --torch"),
        (["--accuracy"], "without --linear, --torch and --losses"),
        (["--grid", "9"], "--grid draws its own problems"),
        (["--plot", "x.svg"], "--plot draws the speed of the row-wise operators"),
        (["--update-readme", "--quick"], "takes a full run"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["bench", "--losses", *arguments]) == 2
    assert message in capsys.readouterr().err
