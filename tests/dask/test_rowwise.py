"""Test that row-wise operators on dask arrays are lazy, and give the bits of one call for any chunks."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask_chunks import assert_identical, chunks, from_array
from hypothesis import given
from hypothesis import strategies as st
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED, OPERATORS, random_problem
from strategies import problems

import ascend_grad as ag
import ascend_grad.dask as agd


@given(st.data(), st.sampled_from(OPERATORS))
def test_blocks_have_the_bits_of_one_call(data, operator):
    problem = data.draw(problems(operator))
    axis = problem.settings.get("axis", -1) % max(len(problem.shape), 1)
    arrays = list(problem.arrays)
    if operator in MASKED:
        spread = data.draw(st.tuples(st.booleans(), st.booleans()))
        arrays[-1] = arrays[-1][tuple(slice(0, 1) if each else slice(None) for each in spread)]
    cut = [from_array(array, data.draw(chunks(array.shape, axis))) for array in arrays]
    if data.draw(st.booleans()):
        cut[-1] = arrays[-1]  # this argument stays an array of NumPy
    result = getattr(agd, operator)(*cut, **problem.settings)
    expected = getattr(ag, operator)(*arrays, **problem.settings)
    assert isinstance(result, da.Array)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert_identical(result.compute(scheduler="synchronous"), expected)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("cut", [(0, 1), (1, 0), (0, 1, 0), (0, 0, 2), (0, 2), (2, 0), (1, 1), (0, 0)])
def test_empty_chunks_in_one_argument_alone(operator, cut):
    problem = random_problem(operator, (2, 3, sum(cut), 4), np.float32)
    expected = getattr(ag, operator)(*problem.arrays, **problem.settings)
    for i in range(len(problem.arrays)):
        arrays = [da.from_array(array, chunks=(1, -1, -1, -1)) for array in problem.arrays]
        arrays[i] = arrays[i].rechunk((2, 3, cut, 4))
        result = getattr(agd, operator)(*arrays, **problem.settings)
        assert result.shape == expected.shape
        assert_identical(result.compute(scheduler="synchronous"), expected)
        if operator in MASKED:
            arrays[-1] = arrays[-1][:1, :1].rechunk(((0, 1), (1, 0), -1, -1))
            few = problem.arrays[-1][:1, :1]
            result = getattr(agd, operator)(*arrays, **problem.settings)
            right = getattr(ag, operator)(*problem.arrays[:-1], few, **problem.settings)
            assert_identical(result.compute(scheduler="synchronous"), right)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scheduler(operator, dtype, compute):
    problem = random_problem(operator, (4, 3, 5, 7), DTYPES[dtype])
    arrays = [from_array(array, ((2, 2), (1, 2), (3, 2), (7,))) for array in problem.arrays]
    (result,) = compute(getattr(agd, operator)(*arrays, **problem.settings))
    assert_identical(result, getattr(ag, operator)(*problem.arrays, **problem.settings))


@pytest.mark.parametrize("operator", OPERATORS)
def test_blocks_keep_the_axis_order(operator):
    problem = random_problem(operator, (4, 3, 5, 7), np.float32)
    arrays = [da.from_array(array.transpose(2, 0, 3, 1).copy().transpose(1, 3, 0, 2)) for array in problem.arrays]
    result = getattr(agd, operator)(*arrays, **problem.settings).compute(scheduler="synchronous")
    assert result.strides == np.empty_like(arrays[0].compute(scheduler="synchronous"), order="K").strides
    assert_identical(result, getattr(ag, operator)(*problem.arrays, **problem.settings))


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_is_computed_before_it_is_asked_for(operator):
    def fail(block):
        raise AssertionError

    arrays = [
        da.map_blocks(fail, da.zeros((2, 2, 2, 2), chunks=1).rechunk({3: -1}), dtype=bool if name == "mask" else float)
        for name in ARRAYS[operator]
    ]
    result = getattr(agd, operator)(*arrays)
    assert result.numblocks == (2, 2, 2, 1)
    with pytest.raises(AssertionError):
        result.compute(scheduler="synchronous")


def test_a_block_of_the_result_needs_one_of_each_argument():
    """A block of the result depends on one block of each argument, so memory is needed for blocks only."""
    seen = []

    def note(block, block_info=None):
        seen.append(block_info[0]["chunk-location"])
        return block

    x = da.map_blocks(note, da.zeros((6, 4), chunks=(2, 4)), dtype=float, meta=np.empty((0, 0)))
    agd.softmax_backward(x, x).blocks[1].compute(scheduler="synchronous")
    assert seen == [(1, 0)]


def test_blocks_are_computed_on_one_thread_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(ag, "softmax", lambda block, **settings: seen.append(settings) or block)
    x = da.zeros((2, 2), chunks=1).rechunk({1: -1})
    agd.softmax(x).compute(scheduler="synchronous")
    agd.softmax(x, num_threads=None, backend="reference").compute(scheduler="synchronous")
    assert [each["num_threads"] for each in seen] == [1, 1, None, None]
    assert [each["backend"] for each in seen] == [None, None, "reference", "reference"]


def test_the_backend_is_that_of_the_callers_context(computed_by):
    with ag.use_backend("reference"):
        result = agd.softmax(da.zeros(2))
    result.compute(scheduler="threads")
    assert computed_by == ["reference"]


def test_equal_calls_are_one_task():
    x = da.zeros((4, 2), chunks=2)
    assert agd.softmax(x).name == agd.softmax(x).name != agd.softmax(x, backend="reference").name


def test_masks_of_bfloat16_problems_are_cut_with_them():
    x = np.ones((4, 2, 1, 3), BFLOAT16)
    mask = np.arange(3).reshape(1, 1, 1, 3) == 0
    result = agd.scaled_masked_softmax(da.from_array(x, chunks=(1, 1, 1, 3)), mask)
    assert result.numblocks == (4, 2, 1, 1)
    assert_identical(result.compute(scheduler="synchronous"), ag.scaled_masked_softmax(x, mask))
