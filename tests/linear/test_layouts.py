"""Test layouts and ``out=`` of the linear operators: bits depend on values alone, and nothing else is written."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import GRADIENT, LINEAR, LOSS, MODES, STATISTICS, WHOLE, LinearProblem, Shape, in_layout, problem_of
from samples import (
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    Layout,
    allocated,
    assert_fresh,
    assert_guarded,
    assert_identical,
    native_copy,
)
from strategies import layouts, views

import ascend_grad as ag
from ascend_grad import arrays as library_arrays
from ascend_grad.bounds import ANY

SIZES = (0, 1, 2, 3, 7, 8, 16, 17, 33, 50, 70)

#: The options of each operator's problems.
KINDS = {
    GRADIENT: [{"mode": mode, "mask": mask} for mode in MODES for mask in ("bool", "bits")],
    STATISTICS: [{"return_logits": True}, {"return_logits": False}],
    LOSS: [{"logits": True}, {"logits": False}],
    WHOLE: [{"reduction": reduction} for reduction in ("mean", "sum", "none")],
}


@st.composite
def problems(draw, operator: str) -> LinearProblem:
    shape = Shape(*(draw(st.sampled_from(SIZES)) for _ in range(3)))
    if operator == STATISTICS:
        shape = shape._replace(V=max(shape.V, 1))
    how = draw(st.sampled_from(KINDS[operator]))
    problem = problem_of(operator, shape, draw(st.sampled_from(tuple(DTYPES))), **how)
    return repeatable(problem) if operator == GRADIENT else problem


#: Arguments with the shapes of the results, for the operators that take `out`.
SHAPES_OF_RESULTS = {GRADIENT: ("input", "weight"), LOSS: ("logits_max", "vocab_parallel_logits")}


def shapes_of_results(problem: LinearProblem) -> list[tuple[int, ...]]:
    return [problem.arguments[name].shape for name in SHAPES_OF_RESULTS[problem.operator]]


def repeatable(problem: LinearProblem) -> LinearProblem:
    """Return the problem with all targets in range, so that mask and targets may be repeated independently."""
    target = problem.arguments["masked_target"]
    return problem.replaced(masked_target=np.mod(target, max(len(problem.arguments["weight"]), 1)))


def identical(results, expected) -> None:
    for result, right in zip(results, expected, strict=True):
        if result is None or right is None:
            assert result is right
        else:
            assert_identical(result, right)


def ordinary(problem: LinearProblem) -> LinearProblem:
    return problem.mapped(native_copy)


# ---- inputs ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40)
def test_any_layout(linear, engine, data):
    """Inputs and `out` may have any layout, and `out` any dtype. Gaps in `out` are not written."""
    problem = data.draw(problems(linear))
    strange = replace(problem.mapped(lambda array: data.draw(views(array))), constant=ANY)  # rows may repeat
    plain = ordinary(strange)
    results = engine.solve(strange)
    identical(results, engine.solve(plain))
    engine.assert_solved(plain, results)
    for result in results:
        if result is not None:
            assert_fresh(result, result.shape, result.dtype)
    if linear in SHAPES_OF_RESULTS and all(result is not None for result in results):
        check_outs(strange, plain, engine, data)
    for name, array in strange.arrays.items():
        assert_identical(array, plain.arguments[name])


def check_outs(strange: LinearProblem, plain: LinearProblem, engine, data) -> None:
    outs, buffers, fresh = [], [], []
    for size in shapes_of_results(plain):
        out_dtype = DTYPES[data.draw(st.sampled_from(tuple(DTYPES)))]
        out, buffer = allocated(size, out_dtype, data.draw(layouts(len(size))))
        outs.append(out)
        buffers.append(buffer)
        fresh.append(np.empty(size, out_dtype))
    results = engine.solve(strange, out=tuple(outs))
    assert all(result is out for result, out in zip(results, outs, strict=True))
    for out, buffer in zip(outs, buffers, strict=True):
        assert_guarded(out, buffer)
    identical(outs, engine.solve(plain, out=tuple(fresh)))
    engine.assert_solved(plain, tuple(outs))


def at_odd_offset(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(bytes(1) + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("operator", LINEAR)
def test_bytes_at_odd_offsets(operator, dtype, engine):
    for rows in (1, 5):  # a product of one row has another order of sums
        for width in range(2, 20):
            problem = problem_of(operator, Shape(rows, 3, width), dtype)
            identical(engine.solve(problem.mapped(at_odd_offset)), engine.solve(problem))


@pytest.mark.parametrize("operator", LINEAR)
def test_large_arrays_in_any_layout(operator, dtype, cpu_engine):
    """Problems of several blocks of rows, vocabulary entries and features give the same bits in any layout."""
    problem = problem_of(operator, Shape(150, 1100, 70), dtype, **KINDS[operator][0])
    expected = cpu_engine.solve(problem)
    for layout in LAYOUTS:
        identical(cpu_engine.solve(in_layout(problem, layout)), expected)


@pytest.mark.parametrize("operator", LINEAR)
def test_rows_without_memory_of_their_own(operator, dtype, engine):
    """One row of each array is repeated, by strides of 0."""
    problem = problem_of(operator, Shape(40, 33, 17), dtype, **KINDS[operator][0])
    repeated = problem.mapped(lambda array: np.broadcast_to(array[:1], array.shape))
    identical(engine.solve(repeated), engine.solve(ordinary(repeated)))


def test_one_array_in_several_places(dtype, engine):
    x = problem_of(WHOLE, Shape(40, 40, 17), dtype).arguments["input"]
    target = np.arange(40) % 7
    same, copied = (LinearProblem(WHOLE, {"input": x, "weight": weight, "target": target}) for weight in (x, x.copy()))
    identical(engine.solve(same), engine.solve(copied))


# ---- results ---------------------------------------------------------------------------------------------------------


def test_out_holds_what_fresh_results_hold(dtype, engine):
    for how in KINDS[GRADIENT]:
        problem = problem_of(GRADIENT, Shape(37, 130, 19), dtype, **how)
        expected = engine.solve(problem)
        outs = tuple(np.empty(shape, DTYPES[dtype]) for shape in shapes_of_results(problem))
        for some in (outs, (outs[0], None), (None, outs[1])):
            for out in outs:
                out.fill(7)
            identical(engine.solve(problem, out=some), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 256, 17), (37, 67, 19), (150, 1100, 70)], ids=str)
def test_the_accumulator_is_rounded_once(shape, mode, dtype, cpu_engine):
    """Results are accumulators that are rounded to the dtype of `out` in one step."""
    problem = problem_of(GRADIENT, shape, dtype, mode=mode)
    wide = library_arrays.accumulator_dtype(DTYPES[dtype])
    accumulators = cpu_engine.solve(problem, out=tuple(np.empty(size, wide) for size in shapes_of_results(problem)))
    identical(cpu_engine.solve(problem), [oracles.rounded(each, DTYPES[dtype]) for each in accumulators])
    for out_dtype in DTYPES.values():
        outs = tuple(np.empty(size, out_dtype) for size in shapes_of_results(problem))
        cpu_engine.solve(problem, out=outs)
        identical(outs, [oracles.rounded(each, out_dtype) for each in accumulators])


def test_losses_of_another_dtype(dtype, engine):
    problem = problem_of(LOSS, Shape(37, 67, 19), dtype)
    for out_dtype in DTYPES.values():
        outs = tuple(np.empty(shape, out_dtype) for shape in shapes_of_results(problem))
        engine.assert_solved(problem, engine.solve(problem, out=outs))


# ---- out and the inputs share memory ---------------------------------------------------------------------------------


def writable(problem: LinearProblem) -> LinearProblem:
    return problem.mapped(np.array)


@pytest.mark.parametrize("mode", MODES)
def test_in_place(mode, dtype, engine):
    problem = problem_of(GRADIENT, Shape(130, 130, 33), dtype, mode=mode)
    expected = engine.solve(problem)
    for places in (("input", "weight"), ("weight", "input"), ("input", None), (None, "weight")):
        copy = writable(problem)
        outs = tuple(None if name is None else copy.arguments[name] for name in places)
        results = engine.solve(copy, out=outs)
        identical(results, expected)
        for name, array in copy.arrays.items():
            if name not in places:
                assert_identical(array, problem.arguments[name])


@pytest.mark.parametrize("name", ["input", "weight"])
def test_partial_overlap(name, dtype, engine):
    problem = problem_of(GRADIENT, Shape(50, 50, 33), dtype)
    expected = engine.solve(problem)
    array = problem.arguments[name]
    for offset, which in itertools.product((1, -1, 33, -34, 500), range(2)):
        memory = np.zeros(array.size + abs(offset), array.dtype)
        start = max(-offset, 0)
        shared = memory[start:][: array.size].reshape(array.shape)
        shared[...] = array
        out = memory[start + offset :][: array.size].reshape(array.shape)
        outs = (out, None) if which == 0 else (None, out)
        identical(engine.solve(problem.replaced(**{name: shared}), out=outs), expected)


@pytest.mark.parametrize("mode", MODES)
def test_out_shares_the_memory_of_any_input(mode, dtype, engine):
    problem = problem_of(GRADIENT, Shape(40, 50, 33), dtype, mode=mode, mask="bits")
    expected = engine.solve(problem)
    for name, array in problem.arrays.items():
        for which, size in enumerate(shapes_of_results(problem)):
            out = np.zeros(max(size[0] * size[1], -(-array.nbytes // DTYPES[dtype].itemsize)), DTYPES[dtype])
            shared = out.view(np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
            shared[...] = array
            out = out[: size[0] * size[1]].reshape(size)
            outs = (out, None) if which == 0 else (None, out)
            identical(engine.solve(problem.replaced(**{name: shared}), out=outs), expected)


def test_out_is_another_view_of_an_input(dtype, engine):
    problem = writable(problem_of(GRADIENT, Shape(33, 33, 33), dtype))
    expected = engine.solve(problem)
    for name, view in (("input", np.transpose), ("weight", np.flipud), ("weight", np.fliplr)):
        copy = writable(problem)
        out = view(copy.arguments[name])
        identical(engine.solve(copy, out=(out, None)), expected)
        copy = writable(problem)
        out = view(copy.arguments[name])
        identical(engine.solve(copy, out=(None, out)), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_in_place(dtype, engine):
    problem = problem_of(LOSS, Shape(50, 33, 17), dtype)
    expected = engine.solve(problem)
    for name in ("logits_max", "sum_exp_logits", "predicted_logits"):
        copy = writable(problem)
        outs = (copy.arguments[name], copy.arguments["vocab_parallel_logits"])
        identical(engine.solve(copy, out=outs), expected)
    copy = writable(problem)
    first = copy.arguments["vocab_parallel_logits"]
    identical(engine.solve(copy, out=(None, first[::-1])), expected)
    copy = writable(problem)
    identical(engine.solve(copy, out=(copy.arguments["vocab_parallel_logits"][:, 0], None)), expected)


# ---- kinds of out ----------------------------------------------------------------------------------------------------


def test_subclasses_and_files_are_filled_and_returned(tmp_path, backend):
    problem = problem_of(GRADIENT, Shape(9, 6, 5), "float64")
    expected = ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend=backend)
    file = np.memmap(tmp_path / "out", np.float64, "w+", shape=(9, 5))
    for outs in ((np.empty((9, 5)).view(np.recarray), np.empty((6, 5)).view(np.memmap)), (file, None)):
        results = ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend=backend, out=outs)
        assert results[0] is outs[0]
        identical([np.asarray(result) for result in results], expected)


def test_nothing_is_written_for_empty_results(dtype, engine):
    for shape in (Shape(0, 5, 3), Shape(5, 0, 3), Shape(5, 4, 0)):
        problem = problem_of(GRADIENT, shape, dtype)
        two = Layout((0, 1), (1, 1))
        pairs = [allocated(size, DTYPES[dtype], two) for size in shapes_of_results(problem)]
        engine.solve(problem, out=tuple(out for out, _ in pairs))
        for out, buffer in pairs:
            assert_guarded(out, buffer)
            assert not np.any(out)


def test_a_result_that_does_not_fit_raises_memory_error(backend):
    x = np.broadcast_to(BFLOAT16.type(1), (2, 2**45))
    problem = problem_of(GRADIENT, Shape(2, 2, 3), "bfloat16").replaced(input=x, weight=x)
    outs = (None, None)
    with pytest.raises(MemoryError):
        ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend=backend, out=outs)
