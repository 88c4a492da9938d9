"""Test the benchmark with PyTorch: torch as a competitor, and cases on tensors. No test depends on speed."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark_settings import hurry
from cross_entropy_oracles import expected

from ascend_grad.bench import arrays, cases, documents, frameworks, measure
from ascend_grad.bench.case import (
    AFTER_TORCH,
    AUTOGRAD,
    BACKWARD,
    BROADCAST,
    BYTE_SWAPPED,
    C_ORDER,
    CROSS_ENTROPY,
    FORWARD,
    HVP,
    LAYOUTS,
    LINEAR_MODES,
    LOGITS_OPTIONS,
    NEGATIVE_STEPS,
    PRODUCT,
    RANDOM,
    ROWS_HVP,
    ROWWISE,
    TENSORS,
    WHOLE,
    Case,
)
from ascend_grad.bench.results import ARRAYS, AWAKE, OWN, Growth, Results, Row
from ascend_grad.bench.sides import compared, linear, second_order
from ascend_grad.bench.targets import tensors_targets
from ascend_grad.cli.main import main

SHAPE = (5, 11, 3)
LINEAR = [Case(operator, "float32", SHAPE, mode) for operator, modes in LINEAR_MODES.items() for mode in modes]
LOSS = Case(WHOLE, "float32", SHAPE, "loss and gradients", suite=TENSORS)
TORCH = "torch"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Shorten each turn of the benchmark to a few microseconds."""
    hurry(monkeypatch)


def random_problem(operator: str, dtype: str, shape: tuple[int, ...], mode: str, dim: int, options: str = "") -> Case:
    return Case(operator, dtype, shape, mode, dim, C_ORDER, C_ORDER, dtype, options, suite=RANDOM)


# ---- PyTorch as a competitor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_torch_computes_the_linear_cases(case, dtype):
    case = replace(case, dtype=dtype)
    given = arrays.linear_arguments(case)
    results = arrays.gradients_like(given)

    def found(side):
        return [array.copy() for array in frameworks.as_arrays(linear.SIDES[side](case, given, results)())]

    expected = found(OWN)
    with frameworks.no_autograd():
        for side in ("torch", *(["torch chunked"] if case.operator == WHOLE else [])):
            assert linear.agree(found(side), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", FORWARD)
def test_torch_takes_part_in_random_problems_where_it_can_express_a_layout(operator, dtype):
    problem = random_problem(operator, dtype, (3, 4, 5), "out", 2)
    for layout in LAYOUTS:
        found = measure.measure(replace(problem, arrangement=layout), 1)
        assert ("torch" in found.seconds) == (layout not in ("negative steps", "byte-swapped"))


@pytest.mark.parametrize("problem", cases.draw(120, 0, ROWWISE[:-1], 300), ids=lambda problem: problem.name)
def test_torch_takes_part_in_every_layout_without_negative_steps(problem):
    """PyTorch's private functions would write wrong values into a strided `out`, and then take no part."""
    impossible = {NEGATIVE_STEPS, BYTE_SWAPPED} & {problem.arrangement, problem.out_arrangement}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (TORCH in measure.measure(problem, 1).seconds) == (not impossible)


@pytest.mark.parametrize(
    "call", [call for call in cases.programs() if call.place == AFTER_TORCH], ids=lambda call: call.name
)
def test_torch_takes_part_in_programs(call):
    shape = (3, 4, 5) if call.dim is None else (3, 5)
    assert {OWN, TORCH} < set(measure.measure(replace(call, shape=shape), 2).seconds)


@pytest.mark.parametrize("options", ["", *LOGITS_OPTIONS])
@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
def test_torch_computes_the_loss_of_logits(options, shape, dim):
    """The call is compared with the definition in extended precision, and not only with this library."""
    problem = random_problem(CROSS_ENTROPY, "float64", shape, "fresh", dim, options)
    (x,), _, settings = arrays.operands(problem)
    right = expected(x, settings.pop("target"), dim, **settings)
    loss, gradient = frameworks.as_arrays(compared(problem, 1).calls["torch"]())
    np.testing.assert_allclose(loss, right["loss"].astype(float), rtol=1e-12)
    np.testing.assert_allclose(gradient, right["input_grad"].astype(float), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("mode", ["fresh", "out", "in place"])
def test_torch_takes_part_in_losses_of_logits_where_it_can_express_a_layout(dtype, mode):
    problem = random_problem(CROSS_ENTROPY, dtype, (3, 4, 5), mode, 2)
    for layout in LAYOUTS:
        if (layout, mode) != (BROADCAST, "in place"):
            found = measure.measure(replace(problem, arrangement=layout), 1)
            assert ("torch" in found.seconds) == (layout not in ("negative steps", "byte-swapped"))
            assert {OWN, "numpy"} <= set(found.seconds)


@pytest.mark.parametrize("options", ["", *LOGITS_OPTIONS])
@pytest.mark.parametrize(("shape", "dim"), [((40_000, 9), 1), ((2, 9, 40_000), 1)])
def test_losses_whose_sum_overflows_float16_are_compared(options, shape, dim):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure.measure(random_problem(CROSS_ENTROPY, "float16", shape, "fresh", dim, options), 2)
    assert TORCH in found.seconds


@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
def test_torch_computes_products_of_logits(shape, dim):
    problem = random_problem(ROWS_HVP, "float64", shape, "fresh", dim)
    a = second_order.arrays_of(problem)
    right = expected(a.x, a.target, dim, vector=a.vector)["product"].astype(float)
    np.testing.assert_allclose(second_order.torch_twice(a)(), right, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_torch_takes_part_in_products(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for problem in (
            Case(HVP, dtype, (40, 5, 3), PRODUCT, suite=RANDOM),
            *(
                replace(random_problem(ROWS_HVP, dtype, (3, 4, 5), "fresh", dim), arrangement=layout)
                for layout in LAYOUTS
                for dim in range(3)
            ),
        ):
            found = measure.measure(problem, 1).seconds
            impossible = problem.arrangement in (NEGATIVE_STEPS, BYTE_SWAPPED)
            assert (TORCH in found) == (not impossible)


# ---- cases on tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.TENSOR_DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 1), ((2, 3, 4), 1)])
def test_row_wise_cases_are_measured(dtype, shape, dim):
    for operator in BACKWARD:
        for mode in ("out", "fresh"):
            row = measure.measure(Case(operator, dtype, shape, mode, dim, suite=TENSORS), 1)
            assert set(row.seconds) == {OWN, ARRAYS, TORCH}
    for operator in FORWARD:
        row = measure.measure(Case(operator, dtype, shape, AUTOGRAD, dim, suite=TENSORS), 1)
        assert set(row.seconds) == {OWN, TORCH, OWN + AWAKE, TORCH + AWAKE}
        assert all(seconds > 0 for seconds in row.seconds.values())


@pytest.mark.parametrize("dtype", cases.TENSOR_DTYPES)
def test_the_loss_is_measured(dtype):
    row = measure.measure(replace(LOSS, dtype=dtype), 1)
    assert {OWN, "torch", "torch chunked"} < set(row.seconds)


def test_a_side_that_computes_other_values_takes_no_part(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "log_softmax", torch.softmax)
    case = Case("log_softmax", "float32", (3, 5), AUTOGRAD, 1, suite=TENSORS)
    with pytest.warns(UserWarning, match="torch computes other values"):
        assert set(measure.measure(case, 1).seconds) == {OWN, OWN + AWAKE}


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sample() -> Results:
    """Return invented results.

    A call on tensors takes a microsecond more than a call on arrays. Torch takes twice as long as the library.
    """
    rows, linear = [], []
    for case in cases.tensors():
        if case.dim is None:
            linear.append(Row(case, {OWN: 1.0, "torch": 2.0, "torch chunked": 4.0}))
        elif case.mode == AUTOGRAD:
            rows.append(Row(case, {OWN: 1.0, TORCH: 2.0, OWN + AWAKE: 1.0, TORCH + AWAKE: 2.0}))
        else:
            rows.append(Row(case, {OWN: 2e-6, ARRAYS: 1e-6, TORCH: 4e-6}))
    memory = [
        Growth(case, side, 90, 100) for case in cases.tensors_memory() for side in (OWN, "torch", "torch chunked")
    ]
    return Results({"CPU": "an abacus"}, 2, {"speed": rows, "linear": linear, "memory": memory})


def test_targets_tell_what_is_met(sample):

    def met(section: str, **seconds: float) -> list:
        """Return the verdicts if some sides of a section have other seconds."""
        changed = [replace(row, seconds=row.seconds | seconds) for row in sample[section]]
        return [
            target.met for target in tensors_targets(replace(sample, sections=sample.sections | {section: changed}))
        ]

    assert met("speed") == [True] * 6
    assert tensors_targets(sample)[0].measured.startswith("1.00 µs")
    assert met("speed", **{OWN: 9.0}) == [False, False, False, True, True, True]
    assert met("speed", **{OWN + AWAKE: 9.0}) == [True, True, True, False, True, True]
    assert met("linear", **{OWN: 1.6}) == [True, True, True, True, True, False]
    assert [target.met for target in tensors_targets(Results({}, 1, {}))] == [None] * 6


def test_tables_are_rectangular(sample):
    blocks = documents.blocks({"tensors": sample})
    tables = {name for name in blocks if name != "tensors_machine"}
    assert tables == {f"tensors_{name}" for name in ("calls", "autograd", "losses", "targets", "memory")}
    for name in tables:
        assert len({line.count("|") for line in blocks[name].splitlines()}) == 1
    assert "| softmax_backward float32 8 × 8 out " in blocks["tensors_calls"]
    assert "| log_softmax bfloat16 4096 × 4096 " in blocks["tensors_autograd"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch, tmp_path, capsys):
    small = [
        Case("softmax_backward", "float32", (3, 5), "out", 1, suite=TENSORS),
        Case("softmax", "float32", (3, 5), AUTOGRAD, 1, suite=TENSORS),
        LOSS,
    ]
    monkeypatch.setattr(cases, "tensors", lambda quick: small)
    monkeypatch.setattr(cases, "tensors_memory", lambda: [replace(LOSS, shape=(16, 3000, 32))])
    file = tmp_path / "results.json"
    assert main(["bench", "torch", "--threads", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for text in (
        "softmax_backward float32 3 × 5 out",
        "softmax float32 3 × 5",
        "float32 5 × 11 × 3",
        "MiB beyond the results",
    ):
        assert text in out
    found = Results.from_json(file.read_text())
    assert [row.case for row in found.rows] == small
    assert {growth.side for growth in found["memory"]} == {OWN, "torch", "torch chunked"}
    assert np.all([growth.bytes >= 0 for growth in found["memory"]])


def test_a_filter_without_cases_is_told(capsys):
    assert main(["bench", "torch", "--filter", "nothing like it"]) == 2
    assert "no case contains 'nothing like it'" in capsys.readouterr().err


def test_without_torch_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(frameworks, "module", lambda name: None)
    assert main(["bench", "torch"]) == 2
    assert "bench torch needs PyTorch" in capsys.readouterr().err


def test_an_older_torch_is_told(monkeypatch, capsys):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")
    assert main(["bench", "torch"]) == 2
    assert "bench torch needs PyTorch 2.13 or newer" in capsys.readouterr().err
