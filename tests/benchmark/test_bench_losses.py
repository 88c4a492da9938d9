"""Test the benchmark of losses on tiny cases, from arguments to tables. No test depends on the speed of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cross_entropy_oracles import expected
from samples import DTYPES

import ascend_grad as ag
from ascend_grad.bench import arrays, case, cases, documents, frameworks, measure, report
from ascend_grad.bench.case import (
    CROSS_ENTROPY,
    HVP,
    IN_PLACE,
    JAX,
    LAYOUTS,
    LOGITS_OPTIONS,
    OTHER_CALLS,
    PRODUCT,
    RANDOM,
    ROWS_HVP,
    SPARSE,
    TOP_K,
    WHOLE,
    Case,
)
from ascend_grad.bench.cases import FIRST, OPTION_MODES, OUTPUTS, TOP_K_MODES
from ascend_grad.bench.measure import DisagreementError
from ascend_grad.bench.results import CHAIN, GRADIENT_CALL, OWN, Failure, Results, Row
from ascend_grad.bench.sides import compared, cross_entropy, second_order, sparse
from ascend_grad.bench.targets import losses_targets
from ascend_grad.cli.main import main

SHAPE = (5, 130, 3)
LINEAR = [
    *(Case(WHOLE, "float32", SHAPE, mode) for mode in (*OPTION_MODES, *OUTPUTS)),
    *(Case(TOP_K, "float32", SHAPE, mode) for mode in TOP_K_MODES),
]

PRODUCTS = [
    Case(HVP, "float32", SHAPE, PRODUCT, suite=RANDOM),
    Case(ROWS_HVP, "float32", (6, 10), "fresh", 1, case.C_ORDER, case.C_ORDER, "float32", suite=RANDOM),
]
SPARSE_CASES = [Case(WHOLE, dtype, (40, 3, 30), f"200 {SPARSE}", suite=RANDOM) for dtype in ("float32", "float64")]

pytestmark = pytest.mark.usefixtures("hasty")


def problem(
    shape: tuple[int, ...] = (6, 10), dim: int = 1, dtype: str = "float32", options: str = "", mode: str = "fresh"
) -> Case:
    order = case.C_ORDER
    return Case(CROSS_ENTROPY, dtype, shape, mode, dim, order, order, dtype, options, suite="random")


def only_scipy(name: str) -> Any:
    """Return SciPy's sparse arrays, and no other optional package."""
    return scipy.sparse if name == "scipy.sparse" else None


@pytest.fixture
def sample() -> Results:
    """Make results in which torch takes twice as long for small vocabularies, and four times for large ones.

    NumPy takes five times as long, and the other calls for a linear layer as long as ours.
    """

    def seconds(case: Case) -> dict[str, float]:
        return {OWN: 1e-3, "numpy": 5e-3, "torch": 4e-3 if case.shape[case.dim] >= 32000 else 2e-3}

    compiled = Case(JAX, "float32", FIRST, "compiled")
    relative = dict.fromkeys([*cases.relative(), compiled])
    of_product = {OWN: 2e-3, GRADIENT_CALL: 1e-3, "numpy": 8e-3, "torch": 4e-3}
    of_sparse = {OWN: 1e-3, CHAIN: 2e-3, "numpy": 3e-3, "scikit-learn": 4e-3}
    sections = {
        "logits": [Row(case, seconds(case)) for case in cases.logits()],
        "drawn": [Row(case, seconds(case)) for case in cases.drawn()],
        "linear": [Row(case, {OWN: 1.0, case.other: 1.0}) for case in relative],
        "second_order": [Row(case, of_product) for case in cases.second_order()],
        "sparse": [Row(case, of_sparse) for case in SPARSE_CASES],
        "failures": [Failure("x", "no")],
    }
    return Results({"CPU": "an abacus"}, 2, sections)


def with_sections(results: Results, **sections: list) -> Results:
    return replace(results, sections=results.sections | sections)


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_everything_is_measured():
    named, drawn = cases.logits(), cases.drawn()
    assert {case.dtype for case in named} == {case.dtype for case in drawn} == set(DTYPES)
    assert {case.options for case in named} == {"", *LOGITS_OPTIONS}
    assert {case.mode for case in named} == {"fresh", "out"}
    assert {case.operator for case in drawn} == {CROSS_ENTROPY}
    assert {case.dim == len(case.shape) - 1 for case in drawn} == {True, False}
    assert any(case.shape[case.dim] >= 32000 for case in drawn)


# ---- the loss of logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", *LOGITS_OPTIONS])
@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_numpy_computes_the_definition(options, shape, dim, mode):
    """The formula is compared with the definition in extended precision, and not only with this library."""
    case = problem(shape, dim, "float64", options, mode)
    comparison = compared(case, 1)
    (x,), out, settings = arrays.operands(case)
    right = expected(x.copy(), settings.pop("target"), dim, **settings)
    comparison.reset()
    loss, gradient = comparison.calls["numpy"]()
    np.testing.assert_allclose(loss, right["loss"].astype(float), rtol=1e-12)
    np.testing.assert_allclose(gradient, right["input_grad"].astype(float), rtol=1e-11, atol=1e-14)
    assert gradient.shape == out.shape


@pytest.mark.parametrize("options", ["", *LOGITS_OPTIONS])
@pytest.mark.parametrize("mode", ["fresh", "out", IN_PLACE])
def test_sides_agree_and_are_timed(options, mode, dtype):
    row = measure.measure(problem((2, 9, 5), 1, dtype, options, mode), 1)
    assert {OWN, "numpy"} <= set(row.seconds)
    assert ("numpy widened" in row.seconds) == (DTYPES[dtype].itemsize == 2)


def test_options_are_different():
    """Each option changes the loss of the plain call, and its targets or arguments are what its name says."""
    found = {name: arrays.logits_arguments(problem((200, 20), options=name)) for name in ("", *LOGITS_OPTIONS)}
    x = np.random.default_rng(0).standard_normal((200, 20), np.float32)
    values = {float(ag.cross_entropy(x, **arguments).loss) for arguments in found.values()}
    assert len(values) == len(found)
    assert 0.3 < np.mean(found[case.IGNORED]["target"] == arrays.IGNORE_INDEX) < 0.7
    several = found[case.SEVERAL_TARGETS]
    assert all(len(set(row)) == arrays.TARGETS for row in several["target"].tolist())
    np.testing.assert_allclose(several["target_prob"].sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_a_side_with_another_loss_or_gradient_is_refused(part, monkeypatch):
    def wrong(problem, operands, right=cross_entropy.SIDES["numpy"]):
        call = right(problem, operands)
        return lambda: tuple(value + (0.01 if i == part else 0) for i, value in enumerate(call()))

    monkeypatch.setitem(cross_entropy.SIDES, "numpy", wrong)
    with pytest.raises(DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
        measure.measure(problem((6, 10), dtype="float64"), 1)


# ---- calls for a linear layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_a_linear_case_is_measured(case):
    row = measure.measure(case, 1)
    assert set(row.seconds) == {OWN, OTHER_CALLS[case.operator]}
    assert all(seconds > 0 for seconds in row.seconds.values())


@pytest.mark.parametrize("mode", OPTION_MODES)
def test_options_change_the_linear_loss(mode):
    calls = compared(Case(WHOLE, "float64", SHAPE, mode), 1).calls
    assert abs(calls[OWN]().loss - calls["plain"]().loss) > 1e-4


@pytest.mark.parametrize("mode", OUTPUTS)
def test_outputs_are_further_fields(mode):
    calls = compared(Case(WHOLE, "float32", SHAPE, mode), 1).calls
    assert calls[OWN]()._fields[3:] == (mode,)


def test_another_result_of_the_other_call_is_refused(monkeypatch):
    def wrong(*args, right=ag.linear_top_k, **kwargs):
        found = right(*args, **kwargs)
        return found._replace(log_prob=found.log_prob + np.float32(0.01))

    monkeypatch.setattr(ag, "linear_top_k", wrong)
    with pytest.raises(DisagreementError, match=r"^statistics computes other values than ascend_grad$"):
        measure.measure(Case(TOP_K, "float32", SHAPE, "k = 16"), 1)


def test_jax_is_left_out_where_it_is_not_installed():
    for quick in (False, True):
        assert JAX not in {case.operator for case in cases.relative(quick)}


# ---- second derivatives and sparse inputs ----------------------------------------------------------------------------


def test_random_second_derivatives_and_sparse_inputs(monkeypatch):
    found = cases.second_order()
    assert {case.operator for case in found} == {HVP, ROWS_HVP}
    assert all(case.suite == RANDOM for case in found)
    assert {case.dtype for case in found if case.operator == ROWS_HVP} == set(DTYPES)
    assert min(case.shape[1] for case in found if case.operator == HVP) <= 64
    monkeypatch.undo()  # SciPy is left out otherwise
    sparse_cases = cases.sparse()
    assert sparse_cases == cases.sparse()
    assert {case.dtype for case in sparse_cases} == {"float32", "float64"}
    for each in sparse_cases:
        rows, classes, features = each.shape
        assert rows <= each.stored_elements <= cases.MAX_STORED
        assert each.is_sparse
        assert (2 <= classes <= 200, 300 <= features <= 100_000) == (True, True)
    assert len(cases.sparse(quick=True)) < len(sparse_cases)


def test_sparse_inputs_need_scipy():
    assert cases.sparse() == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 130, 3), (40, 3, 5), (1, 1, 1), (7, 1, 4)])
def test_numpy_computes_products_of_a_layer(shape, dtype):
    """The formula is compared with the definition in extended precision, and not only with this library."""
    comparison = compared(Case(HVP, dtype, shape, PRODUCT, suite=RANDOM), 1)
    a = second_order.arrays_of(Case(HVP, dtype, shape, PRODUCT, suite=RANDOM))
    x, w, v = (each.astype(np.longdouble) for each in (a.x, a.weight, a.vector))
    right = (expected(x @ w.T, a.target, vector=x @ v.T)["product"].T @ x).astype(float)
    error = 1e-12 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(comparison.calls["numpy"](), right, rtol=error, atol=error)


@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((6, 10), 1), ((10, 6), 0), ((2, 9, 3, 4), 1), ((2, 3, 9), 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_computes_products_of_logits(shape, dim, layout):
    case_of_layout = replace(PRODUCTS[1], dtype="float64", shape=shape, dim=dim, arrangement=layout)
    a = second_order.arrays_of(case_of_layout)
    right = expected(a.x, a.target, dim, vector=a.vector)["product"].astype(float)
    product = compared(case_of_layout, 1).calls["numpy"]()
    np.testing.assert_allclose(product, right, rtol=1e-11, atol=1e-14)
    assert product.shape == shape


def test_products_are_timed_beside_the_gradient(dtype):
    for each in PRODUCTS:
        row = measure.measure(replace(each, dtype=dtype, out_dtype=dtype if each.dim else ""), 1)
        assert set(row.seconds) == {OWN, GRADIENT_CALL, "numpy"}


def test_another_product_is_refused(monkeypatch):
    for each in PRODUCTS:

        def wrong(a, right=second_order.SIDES["numpy"]):
            call = right(a)
            return lambda: call() * np.float32(1.01)

        monkeypatch.setitem(second_order.SIDES, "numpy", wrong)
        with pytest.raises(DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
            measure.measure(each, 1)


@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.dtype)
def test_sides_of_sparse_inputs_compute_the_same(case, monkeypatch):
    monkeypatch.undo()
    a = sparse.arrays_of(case)
    assert a.x.shape == (40, 30)
    assert 0 < a.x.nnz <= case.stored_elements
    dense = a.x.toarray().astype(float)
    right = ag.linear_cross_entropy(dense, a.weight.astype(float), a.target, backend="reference")
    for side, prepare in sparse.SIDES.items():
        if (call := prepare(a)) is None:
            assert side == "scikit-learn"
            continue
        loss, gradient = call()
        np.testing.assert_allclose(loss, right.loss, rtol=1e-5)
        np.testing.assert_allclose(gradient, right.weight_grad, rtol=1e-4, atol=1e-6)


def test_another_sparse_loss_is_refused(monkeypatch):
    monkeypatch.setattr(frameworks, "module", only_scipy)
    assert set(measure.measure(SPARSE_CASES[0], 1).seconds) == {OWN, CHAIN, "numpy"}

    def wrong(a, right=sparse.SIDES["numpy"]):
        call = right(a)
        return lambda: (call()[0] + 0.01, call()[1])

    monkeypatch.setitem(sparse.SIDES, "numpy", wrong)
    with pytest.raises(DisagreementError, match=r"^numpy computes other values than ascend_grad$"):
        measure.measure(SPARSE_CASES[0], 1)


# ---- results, targets, tables ----------------------------------------------------------------------------------------


def test_targets_tell_what_is_met(sample):
    assert [target.met for target in losses_targets(sample)] == [True] * 8
    nothing = Results({}, 1, {})
    assert [(target.met, target.measured) for target in losses_targets(nothing)] == [(None, "–")] * 8

    def slower(rows, condition, factor):
        return [
            replace(row, seconds=row.seconds | {OWN: factor * row.own}) if condition(row.case) else row for row in rows
        ]

    large = with_sections(sample, logits=slower(sample["logits"], lambda case: case.shape == (512, 50257), 1.5))
    found = losses_targets(large)
    assert [target.met for target in found] == [True, True, False, *[True] * 5]
    assert found[2].measured.startswith("2.667× (cross_entropy float32 (512, 50257) dim 1, C order, fresh); 4 of ")
    small = next(row.case for row in sample["drawn"] if row.case.shape[row.case.dim] < 32000)
    drawn = with_sections(sample, drawn=slower(sample["drawn"], lambda case: case == small, 6))
    assert [target.met for target in losses_targets(drawn)][:4] == [True, False, True, False]
    linear = with_sections(sample, linear=slower(sample["linear"], lambda case: case.dtype == "float32", 1.08))
    assert [target.met for target in losses_targets(linear)][4:] == [True, False, True, False]
    bfloat16 = with_sections(sample, linear=slower(sample["linear"], lambda case: case.dtype == "bfloat16", 9))
    assert [target.met for target in losses_targets(bfloat16)] == [True] * 8


def test_losses_are_shown(sample):
    assert report.losses_lost(sample["logits"]) == "None.\n"
    first = sample["logits"][0]
    lost = replace(first, seconds=first.seconds | {"torch": 0.5e-3})
    assert report.losses_lost([lost, *sample["logits"][1:]]).count("cross_entropy") == 1
    assert " 0.50× " in report.losses_lost([lost])


def test_tables_are_rectangular(sample):
    blocks = documents.blocks({"losses": sample})
    assert {"loss_machine", "loss_targets"} | {name for name in report.CAPTIONS if name.startswith("loss")} == set(
        blocks
    )
    for name in blocks:
        lines = [line for line in blocks[name].splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
        assert len({len(line) for line in lines}) <= 1
    assert blocks["loss_linear"].count(" 100 % |") == len(sample["linear"])
    of_product = "2.00× (2.00× to 2.00×) | 4.00× (4.00× to 4.00×) | 2.00× (2.00× to 2.00×) |"
    assert blocks["loss_second_order"].count(of_product) == len(
        {(row.case.operator, row.case.dtype) for row in sample["second_order"]}
    )
    assert blocks["loss_second_order_rows"].count("_hvp ") == len(sample["second_order"])
    assert "| all  " in blocks["loss_sparse"]
    assert " 2.00× (2.00× to 2.00×) | 3.00× (3.00× to 3.00×) | 4.00× (4.00× to 4.00×) |" in blocks["loss_sparse"]
    assert blocks["loss_sparse_rows"].count(SPARSE) == len(SPARSE_CASES)
    without: dict[str, list] = {name: [] for name in ("drawn", "linear", "second_order", "sparse")}
    assert set(documents.blocks({"losses": with_sections(sample, **without)})) == {
        "loss_machine",
        "loss_targets",
        "loss_rows",
        "loss_lost",
    }


def test_without_results_there_are_no_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "FOLDER", tmp_path)
    assert documents.contents_of_documents() == {}


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Make the command's cases small."""
    monkeypatch.setattr(cases, "logits", lambda quick=False: [problem(), problem((2, 9, 3), 1, options=case.SMOOTHING)])
    monkeypatch.setattr(cases, "drawn", lambda quick=False: [replace(problem((4, 7)), arrangement="every second")])
    monkeypatch.setattr(cases, "relative", lambda quick: LINEAR)
    monkeypatch.setattr(cases, "second_order", lambda quick: PRODUCTS)
    monkeypatch.setattr(cases, "sparse", lambda quick: SPARSE_CASES)
    monkeypatch.setattr(frameworks, "module", only_scipy)


def test_the_command(small, monkeypatch, tmp_path, capsys):
    document = tmp_path / "losses.md"
    document.write_text("<!-- bench:loss_linear:begin -->\n<!-- bench:loss_linear:end -->\n")
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr(documents, "FOLDER", tmp_path)
    file = tmp_path / "results.json"
    assert main(["bench", "losses", "--threads", "2", "--json", str(file), "--update-readme"]) == 0
    found = Results.from_json(file.read_text())
    assert (tmp_path / "losses.json").read_text() == file.read_text()
    assert [row.case for row in found["logits"]] == cases.logits()
    assert [row.case for row in found["drawn"]] == cases.drawn()
    assert [row.case for row in found["linear"]] == LINEAR
    assert [row.case for row in found["second_order"]] == PRODUCTS
    assert [row.case for row in found["sparse"]] == SPARSE_CASES
    assert "variant" in found.machine
    out = capsys.readouterr().out
    assert "with 2 threads" in out
    assert all(row.case.name in out for row in (*found["logits"], *found["linear"]))
    assert all(row.case.name in out for row in (*found["second_order"], *found["sparse"]))
    assert "| linear_top_k k = 16 float32 5 × 130 × 3 " in document.read_text()


def test_a_choice_of_cases(small, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert main(["bench", "losses", "--filter", "smoothing", "--json", str(file)]) == 0
    found = Results.from_json(file.read_text())
    assert [row.case.name for row in found.rows] == [
        "cross_entropy with smoothing float32 (2, 9, 3) dim 1, C order, fresh",
        *(case.name for case in LINEAR if "smoothing" in case.mode),
    ]
    assert "linear_top_k" not in capsys.readouterr().out


def test_cases_that_fail_leave_the_others(small, monkeypatch, tmp_path, capsys):
    def fails(*args, **kwargs):
        raise MemoryError("1 TiB")

    monkeypatch.setattr(ag, "linear_top_k", fails)
    monkeypatch.setattr(documents, "DOCUMENTS", (tmp_path / "README.md",))
    monkeypatch.setattr(documents, "FOLDER", tmp_path)
    (tmp_path / "README.md").write_text("old")
    assert main(["bench", "losses", "--update-readme"]) == 1
    out, err = capsys.readouterr()
    for each in LINEAR:
        assert (each.name in out) == (each.operator != TOP_K)
        assert (f"failed: {each.name}: MemoryError: 1 TiB\n" in err) == (each.operator == TOP_K)
    assert "the documents are not updated" in err
    assert not (tmp_path / "losses.json").exists()
