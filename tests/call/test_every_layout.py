"""Test every operator, dtype and layout at small sizes: results are right, with equal bits on one and two threads.

Other tests have more sizes, layouts and threads. This file is small enough for an emulated CPU.
"""

from __future__ import annotations

import dataclasses

import cross_entropy_oracles
import loss_samples
import numpy as np
import pytest
from linear_oracles import assert_top_k, logits_of_problem
from linear_samples import LINEAR, TOP_K, Shape, in_layout, problem_of
from samples import DTYPES, LAYOUTS, MASKED, Layout, assert_identical, laid_out, random_problem

import ascend_grad as ag

#: BT, V and H of the linear problems. The first one fits in a tile, the second one has several tiles and remainders.
LINEAR_SHAPES = [(3, 17, 5), (33, 70, 50)]


def on_leading_axes(layout: Layout, rank: int) -> Layout:
    """Extend a layout of matrices to this rank by leading axes that are contiguous."""
    more = rank - 2
    axes = (*range(more), *(more + axis for axis in layout.axes))
    return dataclasses.replace(layout, axes=axes, steps=(*(1 for _ in range(more)), *layout.steps))


def test_rowwise(operator, dtype, cpu_engine):
    shapes = [(2, 3, 5, 37)] if operator in MASKED else [(5, 37), (70, 9), (2, 9, 150)]
    for shape in shapes:
        for axis in range(len(shape)) if operator not in MASKED else (-1,):
            problem = random_problem(operator, shape, DTYPES[dtype], axis)
            expected = cpu_engine(problem, num_threads=1)
            cpu_engine.assert_right(problem, expected)
            for layout in LAYOUTS:
                layout = on_leading_axes(layout, len(shape))
                strange = problem.replaced(*(laid_out(array, layout) for array in problem.arrays))
                for threads in (1, 2):
                    assert_identical(cpu_engine(strange, num_threads=threads), expected)


def test_cross_entropy(dtype, cpu_engine):
    for shape in [(5, 37), (70, 9), (2, 9, 150)]:
        for axis in range(len(shape)):
            arguments = cross_entropy_oracles.random_arguments("layouts", shape, axis, dtype)
            expected = cpu_engine.call("cross_entropy", **arguments, num_threads=1)
            cross_entropy_oracles.assert_right(expected, cross_entropy_oracles.expected(**arguments), dtype)
            for layout in LAYOUTS:
                strange = laid_out(arguments["input"], on_leading_axes(layout, len(shape)), readonly=True)
                for threads in (1, 2):
                    result = cpu_engine.call("cross_entropy", **arguments | {"input": strange}, num_threads=threads)
                    assert_identical(np.asarray(result.loss), np.asarray(expected.loss))
                    assert_identical(result.input_grad, expected.input_grad)


@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("operator", [*LINEAR, TOP_K])
def test_linear(operator, dtype, shape, cpu_engine):
    problem = problem_of(operator, shape, dtype)
    expected = cpu_engine.solve(problem, num_threads=1)
    cpu_engine.assert_solved(problem, expected)
    if operator == TOP_K:
        assert_top_k(expected, *logits_of_problem(problem))
    for layout in LAYOUTS:
        strange = in_layout(problem, layout)
        for threads in (1, 2):
            for result, right in zip(cpu_engine.solve(strange, num_threads=threads), expected, strict=True):
                assert_identical(np.asarray(result), np.asarray(right))


@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear_backward(dtype, shape, cpu_engine):
    forward, backward, upstream = loss_samples.backward_of(Shape(*shape), dtype, "no option")
    expected = ag.linear_cross_entropy_backward(**backward, num_threads=1, backend="cpu")
    loss_samples.check(expected, forward, dtype, **upstream)
    for layout in LAYOUTS:
        strange = backward | {name: laid_out(backward[name], layout, readonly=True) for name in ("input", "weight")}
        for threads in (1, 2):
            results = ag.linear_cross_entropy_backward(**strange, num_threads=threads, backend="cpu")
            for result, right in zip(results, expected, strict=True):
                if right is not None:
                    assert_identical(result, right)
