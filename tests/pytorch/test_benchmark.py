"""Test the benchmark with PyTorch: torch as a competitor, and cases on tensors. No test depends on speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cross_entropy_oracles import expected

from ascend_grad.bench import documents, frameworks
from ascend_grad.bench import measure as timing
from ascend_grad.bench.grid import layouts, losses
from ascend_grad.bench.grid import measure as grid_measure
from ascend_grad.bench.grid import rivals as grid_rivals
from ascend_grad.bench.grid.problems import CROSS_ENTROPY, RowwiseProblem
from ascend_grad.bench.linear import cases as linear_cases
from ascend_grad.bench.linear import measure as linear_measure
from ascend_grad.bench.linear import rivals as linear_rivals
from ascend_grad.bench.linear.cases import WHOLE, LinearCase
from ascend_grad.bench.linear.measure import Growth
from ascend_grad.bench.named import Results
from ascend_grad.bench.pytorch import cases, measure
from ascend_grad.bench.pytorch.cases import AUTOGRAD
from ascend_grad.bench.pytorch.measure import AWAKE
from ascend_grad.bench.pytorch.rivals import ARRAYS, TORCH
from ascend_grad.bench.pytorch.targets import call_targets, loss_targets
from ascend_grad.bench.results import OWN, Row
from ascend_grad.bench.rowwise.cases import BACKWARD, FORWARD, Case
from ascend_grad.cli.main import main

SHAPE = (5, 11, 3)
LINEAR = [LinearCase(operator, mode, "float32", SHAPE) for operator, mode in linear_cases.OPERATIONS]
LOSS = LinearCase(WHOLE, "loss and gradients", "float32", SHAPE)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Shorten each turn of the benchmark to a few microseconds."""
    monkeypatch.setattr(timing, "WARM_UP", 1e-6)
    monkeypatch.setattr(timing, "LOOP", 1e-6)
    monkeypatch.setattr(linear_measure, "LOOP", 1e-6)
    monkeypatch.setattr(linear_measure, "PAUSE", 0)
    monkeypatch.setattr(linear_rivals, "YARDSTICK_SIZE", 8)
    for room in (measure, linear_measure, grid_measure):
        monkeypatch.setattr(room, "TURNS", 2)
    monkeypatch.setattr(measure, "AWAKE_TURNS", 2)
    for name in ("TURN", "LOOP", "PAUSE"):
        monkeypatch.setattr(grid_measure, name, 1e-6)


# ---- PyTorch as a competitor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in LINEAR if case.mode != "filtered"], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_torch_computes_the_linear_cases(case, dtype):
    case = replace(case, dtype=dtype)
    given = linear_cases.arguments(case)
    results = linear_cases.outs(given)
    expected = [frameworks.as_array(value).copy() for value in linear_rivals.ascend_grad(case, given, results)()]
    with frameworks.no_autograd():
        assert linear_rivals.agree(linear_rivals.torch_formula(case, given, results)(), expected, dtype)
        if case.operator == WHOLE:
            assert linear_rivals.agree(linear_rivals.torch_chunked(case, given, results)(), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", FORWARD)
def test_torch_takes_part_in_random_problems_where_it_can_express_a_layout(operator, dtype):
    problem = RowwiseProblem(operator, dtype, (3, 4, 5), 2, "out", layouts.C_ORDER, layouts.C_ORDER, dtype)
    for layout in layouts.LAYOUTS:
        found = grid_measure.measure(replace(problem, arrangement=layout), 1)
        assert ("torch" in found.seconds) == (layout not in ("negative steps", "byte-swapped"))


@pytest.mark.parametrize("options", ["", *losses.OPTIONS])
@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
def test_torch_computes_the_loss_of_logits(options, shape, dim):
    """The call is compared with the definition in extended precision, and not only with this library."""
    order = layouts.C_ORDER
    problem = RowwiseProblem(CROSS_ENTROPY, "float64", shape, dim, "fresh", order, order, "float64", options)
    (x,), _ = grid_rivals.operands(problem)
    target, settings = losses.option(options, shape, dim, "float64")
    right = expected(x, target, dim, **settings)
    loss, gradient = frameworks.as_arrays(grid_rivals.compared(problem, 1).calls["torch"]())
    np.testing.assert_allclose(loss, right["loss"].astype(float), rtol=1e-12)
    np.testing.assert_allclose(gradient, right["input_grad"].astype(float), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("mode", ["fresh", "out", "in place"])
def test_torch_takes_part_in_losses_of_logits_where_it_can_express_a_layout(dtype, mode):
    problem = RowwiseProblem(CROSS_ENTROPY, dtype, (3, 4, 5), 2, mode, layouts.C_ORDER, layouts.C_ORDER, dtype)
    for layout in layouts.LAYOUTS:
        if (layout, mode) != (layouts.BROADCAST, "in place"):
            found = grid_measure.measure(replace(problem, arrangement=layout), 1)
            assert ("torch" in found.seconds) == (layout not in ("negative steps", "byte-swapped"))
            assert {OWN, "numpy"} <= set(found.seconds)


# ---- cases on tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [cases.full, cases.quick])
def test_cases_are_named_uniquely(choice):
    names = [case.name for case in choice()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 1), ((2, 3, 4), 1)])
def test_row_wise_cases_are_measured(dtype, shape, dim):
    for operator in BACKWARD:
        for mode in ("out", "fresh"):
            row = measure.measure(Case(operator, dtype, shape, dim, mode), 1)
            assert set(row.seconds) == {OWN, ARRAYS, TORCH}
    for operator in FORWARD:
        row = measure.measure(Case(operator, dtype, shape, dim, AUTOGRAD), 1)
        assert set(row.seconds) == {OWN, TORCH, OWN + AWAKE, TORCH + AWAKE}
        assert all(seconds > 0 for seconds in row.seconds.values())


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_loss_is_measured(dtype):
    row = measure.measure(replace(LOSS, dtype=dtype), 1)
    assert {OWN, "torch", "torch chunked"} < set(row.seconds)


def test_a_side_that_computes_other_values_takes_no_part(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "log_softmax", torch.softmax)
    case = Case("log_softmax", "float32", (3, 5), 1, AUTOGRAD)
    with pytest.warns(UserWarning, match="torch computes other values"):
        assert set(measure.measure(case, 1).seconds) == {OWN, OWN + AWAKE}


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sample() -> Results:
    """Return invented results.

    A call on tensors takes a microsecond more than a call on arrays. Torch takes twice as long as the library.
    """
    rows, linear = [], []
    for case in cases.full():
        if isinstance(case, LinearCase):
            linear.append(Row(case, {OWN: 1.0, "torch": 2.0, "torch chunked": 4.0}))
        elif case.mode == AUTOGRAD:
            rows.append(Row(case, {OWN: 1.0, TORCH: 2.0, OWN + AWAKE: 1.0, TORCH + AWAKE: 2.0}))
        else:
            rows.append(Row(case, {OWN: 2e-6, ARRAYS: 1e-6, TORCH: 4e-6}))
    memory = [Growth(case, side, 90, 100) for case in cases.memory() for side in (OWN, "torch", "torch chunked")]
    return Results({"CPU": "an abacus"}, 2, rows, linear=linear, memory=memory)


def test_targets_tell_what_is_met(sample):
    targets = [*call_targets(sample.speed), *loss_targets(sample.linear)]
    assert [target.met for target in targets] == [True] * 6
    assert targets[0].measured.startswith("1.00 µs")
    slower = [replace(row, seconds=row.seconds | {OWN: 9 * row.own}) for row in sample.speed]
    assert [target.met for target in call_targets(slower)] == [False, False, False, True]
    slower = [replace(row, seconds=row.seconds | {OWN + AWAKE: 9.0}) for row in sample.speed]
    assert [target.met for target in call_targets(slower)] == [True, True, True, False]
    slower = [replace(row, seconds=row.seconds | {OWN: 1.6}) for row in sample.linear]
    assert [target.met for target in loss_targets(slower)] == [True, False]
    assert [target.met for target in (*call_targets([]), *loss_targets([]))] == [None] * 6


def test_tables_are_rectangular(sample):
    blocks = documents.blocks(None, None, None, sample)
    tables = {name for name in blocks if name != "tensors_machine"}
    assert tables == {f"tensors_{name}" for name in ("calls", "autograd", "losses", "targets", "memory")}
    for name in tables:
        assert len({line.count("|") for line in blocks[name].splitlines()}) == 1
    assert "| softmax_backward float32 8 × 8 out " in blocks["tensors_calls"]
    assert "| log_softmax bfloat16 4096 × 4096 " in blocks["tensors_autograd"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch, tmp_path, capsys):
    small = [
        Case("softmax_backward", "float32", (3, 5), 1, "out"),
        Case("softmax", "float32", (3, 5), 1, AUTOGRAD),
        LOSS,
    ]
    monkeypatch.setattr(cases, "full", lambda: small)
    monkeypatch.setattr(cases, "memory", lambda: [replace(LOSS, shape=(16, 3000, 32))])
    file = tmp_path / "results.json"
    assert main(["bench", "--torch", "--threads", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for text in (
        "softmax_backward float32 3 × 5 out",
        "softmax float32 3 × 5",
        "float32 5 × 11 × 3",
        "MiB beyond the results",
    ):
        assert text in out
    found = Results.from_json(file.read_text())
    assert [row.case for row in (*found.speed, *found.linear)] == small
    assert {growth.side for growth in found.memory} == {OWN, "torch", "torch chunked"}
    assert np.all([growth.bytes >= 0 for growth in found.memory])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "nothing like it"], "no case contains 'nothing like it'"),
        (["--linear"], "without --linear"),
        (["--accuracy"], "without --linear, --torch and --losses"),
        (["--plot", "x.svg"], "--plot draws the speed of the row-wise operators"),
        (["--update-readme", "--quick"], "takes a full run"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["bench", "--torch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_torch_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(frameworks, "module", lambda name: None)
    assert main(["bench", "--torch"]) == 2
    assert "--torch needs PyTorch" in capsys.readouterr().err


def test_an_older_torch_is_told(monkeypatch, capsys):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")
    assert main(["bench", "--torch"]) == 2
    assert "a loss of PyTorch 2.13 or newer" in capsys.readouterr().err
