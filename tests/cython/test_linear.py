"""Test `ascend_grad.linear` from Cython: it gives the Python functions' bits, and statuses instead of exceptions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from samples import DTYPES, Layout, allocated, assert_guarded, assert_identical, generator, laid_out

import ascend_grad as ag

SUCCESS, NULLPTR, INVALID = 0, 161001, 161002

# The sizes lead to every kind of plan: few rows, few vocabulary entries, many features, and blocks of everything.
SHAPES = [(0, 5, 3), (1, 1, 1), (5, 300, 17), (300, 7, 20), (20, 24, 900), (150, 700, 40), (3, 4, 0)]
LAYOUTS = {"rows": Layout((0, 1), (1, 1)), "transposed": Layout((1, 0), (1, 1)), "gaps": Layout((0, 1), (2, -3))}


def problem(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """Make arguments of the gradient, with some masked rows, and with a row whose upstream gradient is 0."""
    tokens, vocab, hidden = shape
    random = generator(shape, dtype)
    acc = np.float64 if dtype == "float64" else np.float32
    x, w = random.standard_normal((tokens, hidden)), random.standard_normal((vocab, hidden))
    target = random.integers(0, vocab, tokens)
    mask = random.random(tokens) < 0.3
    target[mask] = -7
    grad = random.standard_normal(tokens).astype(acc)
    grad[1:2] = 0
    x, w = (values.astype(DTYPES[dtype]) for values in (x, w / max(hidden, 1) ** 0.5))
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    maximum = logits.max(-1, initial=-np.inf)
    exps = np.exp(logits - maximum[:, None])
    sums = exps.sum(-1)
    return {
        "grad": grad,
        "input": x,
        "weight": w,
        "target_mask": mask,
        "masked_target": target,
        "logits_max": maximum.astype(acc),
        "sum_exp_logits": sums.astype(acc),
        "softmax": (exps / sums[:, None]).astype(acc),
    }


class Calls:
    """Call the functions of `linear_calls.pyx` for arrays of one dtype."""

    def __init__(self, module, dtype: str):
        self.module = module
        self.is_16bit = dtype in ("float16", "bfloat16")
        self.type = {"float32": "float", "float64": "double"}.get(dtype)
        self.last = ({"float16": 1, "bfloat16": 2}[dtype],) if self.is_16bit else ()

    def bits(self, array: np.ndarray | None) -> np.ndarray | None:
        is_16bit = array is not None and array.dtype in (np.float16, ml_dtypes.bfloat16)
        return array.view(np.uint16) if is_16bit else array

    def call(self, name: str, *arguments: Any, threads: int | None = None) -> int:
        arguments = tuple(self.bits(a) if isinstance(a, np.ndarray) else a for a in arguments)
        rest = self.last if threads is None else (*self.last, threads)
        function = getattr(self.module, name)[self.type] if self.type else getattr(self.module, f"{name}_bits16")
        return function(*arguments, *rest)

    def gradient(self, arguments, input_grad, weight_grad, workspace=None, threads: int = 1) -> int:
        a = arguments
        if workspace is None:
            size = self.call("grad_workspace", a["input"], a["weight"], a["softmax"], input_grad, weight_grad)
            assert size >= 0
            workspace = np.empty(size, np.uint8)
        return self.call("grad", *a.values(), input_grad, weight_grad, workspace, threads=threads)


@pytest.fixture
def doors(linear_calls, dtype) -> Calls:
    return Calls(linear_calls, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, stored, layout, dtype, doors):
    arguments = problem(shape, dtype)
    if stored:
        arguments |= {"logits_max": None, "sum_exp_logits": None}
    else:
        arguments |= {"softmax": None}
    expected = ag.fused_linear_cross_entropy_loss_grad(**arguments, backend="cpu", num_threads=2)
    for name in ("input", "weight", "softmax"):
        if arguments[name] is not None:
            arguments[name] = laid_out(arguments[name], LAYOUTS[layout], readonly=True)
    for threads in (0, 1, 2):
        outs = [allocated(array.shape, array.dtype, LAYOUTS[layout]) for array in expected]
        assert doors.gradient(arguments, outs[0][0], outs[1][0], threads=threads) == SUCCESS
        for (out, buffer), right in zip(outs, expected, strict=True):
            assert_identical(out, right)
            assert_guarded(out, buffer)


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient(which, dtype, doors):
    arguments = problem((150, 700, 40), dtype) | {"softmax": None}
    expected = ag.fused_linear_cross_entropy_loss_grad(
        **arguments, output_mask=(which == 0, which == 1), backend="cpu"
    )[which]
    outs: list[np.ndarray | None] = [None, None]
    outs[which] = np.empty_like(expected)
    assert doors.gradient(arguments, *outs) == SUCCESS
    assert_identical(outs[which], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_statistics(shape, threads, dtype, doors):
    arguments = problem(shape, dtype)
    x, w = arguments["input"], arguments["weight"]
    tokens, vocab, _ = shape
    start, end = 10, 10 + vocab - (vocab > 1)
    target = np.random.default_rng(3).integers(5, 15 + vocab, tokens)
    expected = ag.fused_linear_online_max_sum(x, w, target, start, end, backend="cpu")
    acc = arguments["grad"].dtype
    results = [np.full(tokens, 7, acc) for _ in range(3)]
    mask, masked_target = np.full(tokens, 7, np.uint8), np.full(tokens, 7, np.int64)
    size = doors.call("max_sum_workspace", x, w)
    workspace = np.empty(size, np.uint8)
    status = doors.call("max_sum", x, w, target, start, end, *results, mask, masked_target, workspace, threads=threads)
    assert status == SUCCESS
    for got, right in zip(results, expected[:3], strict=True):
        assert_identical(got, right)
    assert_identical(np.packbits(mask, bitorder="little"), expected.target_mask)
    assert_identical(masked_target, expected.masked_target)


@pytest.mark.parametrize(
    ("name", "spoil", "status"),
    [
        ("grad", lambda a: a[:-1].copy(), INVALID),
        ("input", lambda a: a[:-1], INVALID),
        ("weight", lambda a: a[:, :-1], INVALID),
        ("target_mask", lambda a: a[:-1].copy(), INVALID),
        ("masked_target", lambda a: a[:-1].copy(), INVALID),
        ("masked_target", lambda a: np.full_like(a, 700), INVALID),
        ("masked_target", lambda a: np.full_like(a, -1), INVALID),
        ("logits_max", lambda a: a[:-1].copy(), INVALID),
        ("sum_exp_logits", lambda a: a[:-1].copy(), INVALID),
        *((name, lambda a: None, NULLPTR) for name in ("grad", "input", "weight", "masked_target", "logits_max")),
    ],
)
def test_what_is_not_taken(name, spoil, status, dtype, doors):
    arguments = problem((50, 700, 40), dtype) | {"softmax": None}
    outs = [np.full_like(arguments[each], 7) for each in ("input", "weight")]
    size = doors.call("grad_workspace", arguments["input"], arguments["weight"], None, *outs)
    arguments[name] = spoil(arguments[name])
    assert doors.gradient(arguments, *outs, np.empty(size, np.uint8)) == status
    assert all((out == 7).all() for out in outs)


@pytest.mark.parametrize("name", ["input", "weight", "softmax", "input_grad", "weight_grad"])
def test_strides_beyond_the_address_space(name, dtype, doors):
    """Strides whose products with the axes' lengths overflow are refused."""
    arguments = problem((50, 70, 40), dtype)
    outs = {f"{each}_grad": np.full_like(arguments[each], 7) for each in ("input", "weight")}
    size = doors.call("grad_workspace", arguments["input"], arguments["weight"], None, *outs.values())
    given = dict(outs)
    spoilt = arguments if name in arguments else given
    spoilt[name] = np.lib.stride_tricks.as_strided(spoilt[name], strides=(2**62, spoilt[name].itemsize))
    assert doors.gradient(arguments, *given.values(), np.empty(size, np.uint8)) == INVALID
    assert all((out == 7).all() for out in outs.values())


@pytest.mark.parametrize("active", [150, 60, 1, 0])
def test_the_returned_workspace_is_enough_for_any_active_rows(dtype, doors, active):
    """The workspace size that the library returns is enough for any number of active rows.

    Plans for fewer active rows differ: both gradients may take one larger sweep instead of a sweep for each.
    """
    arguments = problem((150, 110, 24_000), dtype)
    arguments["grad"][active:] = 0
    outs = np.empty_like(arguments["input"]), np.empty_like(arguments["weight"])
    assert doors.gradient(arguments, *outs) == SUCCESS
    right = ag.fused_linear_cross_entropy_loss_grad(**arguments)
    for out, expected in zip(outs, right, strict=True):
        assert_identical(out, expected)


def test_a_workspace_for_matrices_that_no_memory_holds(dtype, doors):
    """The size of a workspace that no memory holds is reported as an error and does not wrap around."""
    vast = np.broadcast_to(np.zeros((), DTYPES[dtype]), (2**63 // DTYPES[dtype].itemsize - 1, 1))
    one = np.zeros((1, 1), DTYPES[dtype])
    for x, w in ((vast, one), (one, vast), (vast.T, vast.T)):
        assert doors.call("max_sum_workspace", x, w) == -1


def test_too_little_to_work_in(dtype, doors):
    arguments = problem((150, 700, 40), dtype) | {"softmax": None}
    outs = [np.full_like(arguments[each], 7) for each in ("input", "weight")]
    size = doors.call("grad_workspace", arguments["input"], arguments["weight"], None, *outs)
    assert doors.gradient(arguments, *outs, np.empty(size // 2, np.uint8)) == INVALID
    assert doors.gradient(arguments, *outs, None, -1) == INVALID
    assert all((out == 7).all() for out in outs)


def test_results_that_overlap(dtype, doors):
    arguments = problem((50, 50, 40), dtype) | {"softmax": None}
    x, w, out = arguments["input"], arguments["weight"], np.full((50, 40), 7, DTYPES[dtype])
    size = doors.call("grad_workspace", x, w, None, out, out.copy())
    before = x.copy()
    twice = np.lib.stride_tricks.as_strided(np.zeros(4000, out.dtype), (50, 40), (out.itemsize, out.itemsize))
    for outs in ((x, out), (out, x), (out, w), (out, out), (out, twice)):
        workspace = np.empty(size, np.uint8)
        assert doors.gradient(arguments, outs[0], outs[1], workspace) == INVALID
    assert_identical(x, before)
    assert (out == 7).all()


@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (5, 300, 17), (300, 7, 20), (150, 700, 40), (3, 4, 0)])
@pytest.mark.parametrize("threads", [1, 2])
def test_top_k(shape, threads, dtype, doors):
    x, w = (laid_out(problem(shape, dtype)[name], LAYOUTS["gaps"]) for name in ("input", "weight"))
    k = min(3, shape[1])
    temperatures, bias = 0.5 + np.arange(shape[0]) % 3, np.cos(np.arange(float(shape[1])))
    for options in ((0.7, None, None, 1.0, 0.0), (9.0, temperatures, bias, -1.5, 20.0)):
        number, of_rows, of_entries, scale, cap = options
        expected = ag.linear_top_k(
            x,
            w,
            k,
            temperature=number if of_rows is None else of_rows,
            bias=of_entries,
            logit_scale=scale,
            softcap=cap or None,
            backend="cpu",
        )
        workspace = np.empty(doors.call("top_k_workspace", x, w, k, of_rows, of_entries), np.uint8)
        results = tuple(np.full_like(result, 7) for result in expected)
        assert doors.call("top_k", x, w, k, *options, *results, workspace, threads=threads) == SUCCESS
        for result, right in zip(results, expected, strict=True):
            assert_identical(result, right)


def test_what_top_k_does_not_take(dtype, doors):
    arguments = problem((5, 30, 17), dtype)
    x, w = arguments["input"], arguments["weight"]
    log_prob = np.full((5, 3), 7, np.float64 if dtype == "float64" else np.float32)
    index = np.full((5, 3), 7)
    good = {
        "input": x, "weight": w, "k": 3, "temperature": 1.0, "temperatures": np.ones(5), "bias": np.ones(30),
        "logit_scale": 1.0, "softcap": 2.0, "log_prob": log_prob, "index": index,
        "workspace": np.empty(doors.call("top_k_workspace", x, w, 3, np.ones(5), np.ones(30)), np.uint8),
    }  # fmt: skip
    for name, value, status in (
        ("input", None, NULLPTR),
        ("weight", None, NULLPTR),
        ("log_prob", None, NULLPTR),
        ("index", None, NULLPTR),
        ("workspace", None, NULLPTR),
        ("weight", w[:, 1:], INVALID),
        ("weight", w[:2], INVALID),
        ("k", 0, INVALID),
        ("k", 4, INVALID),
        ("k", -1, INVALID),
        ("temperature", 0.0, INVALID),
        ("temperature", -1.0, INVALID),
        ("temperature", np.inf, INVALID),
        ("temperature", np.nan, INVALID),
        ("temperatures", np.ones(4), INVALID),
        ("temperatures", np.array([1.0, 1, 1, 0, 1]), INVALID),
        ("temperatures", np.array([1.0, 1, 1, 1, np.nan]), INVALID),
        ("bias", np.ones(29), INVALID),
        ("logit_scale", np.inf, INVALID),
        ("logit_scale", np.nan, INVALID),
        ("softcap", -1.0, INVALID),
        ("softcap", np.inf, INVALID),
        ("log_prob", log_prob[:4], INVALID),
        ("index", np.full((5, 4), 7), INVALID),
        ("workspace", np.empty(0, np.uint8), INVALID),
    ):
        assert doors.call("top_k", *(good | {name: value}).values(), threads=1) == status, name
    assert np.all(log_prob == 7)
    assert np.all(index == 7)
    for k, temperatures, bias in ((31, None, None), (0, None, None), (3, np.ones(4), None), (3, None, np.ones(31))):
        assert doors.call("top_k_workspace", x, w, k, temperatures, bias) == -1
