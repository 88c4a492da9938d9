"""Test the forms of the linear operators' arguments, and the messages of errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, Hostile, Noted, outcome
from linear_faults import BT, CALLS, H, V, good_call, taken
from linear_samples import GRADIENT, WHOLE, Shape, problem_of
from samples import DTYPES, assert_identical

import ascend_grad as ag
from ascend_grad.operators import table

#: The arguments that the softmax is taken or recomputed from.
STATISTICS_OF_THE_GRADIENT = ("logits_max", "sum_exp_logits", "softmax")

# ---- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["recomputed", "stored"])
def test_statistics_by_position(case, backend):
    """All functions take the statistics by position, `explain` and `workspace_size` included."""
    arguments = good_call(case, **taken(backend)) | {"out": None, "backend": backend}
    names = "grad", "input", "weight", "target_mask", "masked_target", "label_smoothing", *STATISTICS_OF_THE_GRADIENT
    positional = [arguments.get(name, 0.0 if name == "label_smoothing" else None) for name in names]
    options = {name: value for name, value in arguments.items() if name not in names}
    results = ag.fused_linear_cross_entropy_loss_grad(*positional, **options)
    for result, right in zip(results, ag.fused_linear_cross_entropy_loss_grad(**arguments), strict=True):
        assert_identical(result, right)
    assert ag.explain(GRADIENT, *positional, **options) == ag.explain(GRADIENT, **arguments)
    assert ag.workspace_size(GRADIENT, *positional, **options) == ag.workspace_size(GRADIENT, **arguments)
    with pytest.raises(TypeError, match="positional argument"):
        ag.fused_linear_cross_entropy_loss_grad(*positional, (True, True))


# ---- messages --------------------------------------------------------------------------------------------------------


def test_no_mode_at_all(backend):
    """The check for a softmax or statistics comes before all others."""
    error = outcome(ag.fused_linear_cross_entropy_loss_grad, None, None, None, None, None, backend=backend)
    assert type(error) is NULL
    assert str(error).startswith(f"{GRADIENT}: softmax: expected an array, or logits_max and sum_exp_logits instead")


@pytest.mark.parametrize("case", ["recomputed", "stored"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, V, 2**31 - 1, -(2**31)])
def test_the_first_target_out_of_range_is_named(case, packed, bad, backend):
    arguments = good_call(case) | {"backend": backend}
    outs = arguments["out"]
    mask = np.array([True] * 3 + [False] * (BT - 3))
    target = np.array([bad] * 2 + [0] * (BT - 4) + [bad, 5], np.int32)
    arguments |= {"target_mask": np.packbits(mask, bitorder="little") if packed else mask, "masked_target": target}
    # Rows without a gradient are left out of the sums, but their targets are checked.
    for grad in (np.ones(BT, np.float32), np.zeros(BT, np.float32)):
        error = outcome(ag.fused_linear_cross_entropy_loss_grad, **arguments | {"grad": grad})
        assert type(error) is INVALID
        expected = (
            f"{GRADIENT}: masked_target: expected values in [0, {V}) wherever target_mask is 0, got {bad} in row 7"
        )
        assert str(error).startswith(expected)
        assert all(np.all(out == 7) for out in outs)
    mask = mask.copy()
    mask[7] = True
    arguments["target_mask"] = np.packbits(mask, bitorder="little") if packed else mask
    ag.fused_linear_cross_entropy_loss_grad(**arguments)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4", ">i8"])
@pytest.mark.parametrize("layout", [slice(None), slice(None, None, -1), slice(None, None, 2)], ids=str)
def test_a_target_outside_of_the_vocabulary_is_named(dtype, layout, backend):
    x, w = np.ones((BT, H)), np.ones((V, H))
    target = np.array([10, -3, 15, 11, -3, 12, 16, 13, 10], dtype)
    seen = target[layout]
    row = int(np.flatnonzero(seen == 16)[0])
    error = outcome(
        *(ag.linear_cross_entropy, x[layout], w, seen),
        ignore_index=-3,
        vocab_start_index=10,
        backend=backend,
    )
    assert type(error) is INVALID
    assert str(error).startswith(f"{WHOLE}: target: expected values in [10, 16) or -3, got 16 in row {row}")
    ag.linear_cross_entropy(
        x, w, np.where(target == 16, -3, target), ignore_index=-3, vocab_start_index=10, backend=backend
    )


def test_what_an_output_mask_skips_takes_no_out(backend):
    for case, which in itertools.product(("recomputed", "stored"), range(2)):
        arguments = good_call(case) | {"backend": backend}
        outs = arguments["out"]
        arguments["output_mask"] = (which == 1, which == 0)
        error = outcome(ag.fused_linear_cross_entropy_loss_grad, **arguments)
        assert type(error) is INVALID
        assert f"out[{which}]: expected None, as this result is not requested" in str(error)
        assert all(np.all(out == 7) for out in outs)
        arguments["out"] = tuple(None if i == which else out for i, out in enumerate(outs))
        results = ag.fused_linear_cross_entropy_loss_grad(**arguments)
        assert results[which] is None
        assert results[1 - which] is outs[1 - which]
    arguments = good_call("loss") | {"vocab_parallel_logits": None, "backend": backend}
    error = outcome(ag.fused_cross_entropy_loss_with_max_sum, **arguments)
    assert type(error) is INVALID
    assert "out[1]: expected None" in str(error)


def test_where_softmax_is_given_the_rest_is_not_looked_at(backend):
    arguments = good_call("stored") | {"backend": backend}
    expected = ag.fused_linear_cross_entropy_loss_grad(**arguments | {"out": None})
    for junk in (None, "nonsense", Hostile(), np.zeros((3, 3), int), np.full(BT, np.nan, np.float32)):
        more = {"logits_max": junk, "sum_exp_logits": junk, "out": None}
        for result, right in zip(ag.fused_linear_cross_entropy_loss_grad(**arguments | more), expected, strict=True):
            assert_identical(result, right)


def test_a_wrong_size_is_not_what_is_expected():
    x, w, target = np.zeros((13, 8)), np.zeros((50, 8)), np.zeros(13, int)
    with pytest.raises(ag.ParamInvalidError, match=r"weight: expected shape \(V, H = 8\), got \(8, 50\)"):
        ag.linear_cross_entropy(x, w.T, target)


@pytest.mark.parametrize(("rows", "nbytes"), [(1, 0), (70, 8), (72, 8)])
def test_how_many_bytes_of_bits_are_expected(rows, nbytes):
    x = np.zeros((rows, 2), np.float32)
    vector = x[:, 0]
    with pytest.raises(ag.ParamInvalidError, match=f"expected at least {-(-rows // 8)} bytes .*, got \\({nbytes},\\)"):
        ag.fused_linear_cross_entropy_loss_grad(
            vector, x, x[:1], np.zeros(nbytes, np.uint8), np.zeros(rows, int), logits_max=vector, sum_exp_logits=vector
        )


# ---- valid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CALLS)
def test_lists_are_arrays(case, backend):
    """Lists of floats are arrays of float64. All other arrays are then also float64."""
    operator, how = CALLS[case]
    problem = problem_of(operator, Shape(BT, V, H), "float64", **how)
    function = getattr(ag, operator)
    expected = function(**problem.arguments, backend=backend)
    results = function(**problem.mapped(lambda a: a.tolist()).arguments, backend=backend)
    for result, right in zip(results, expected, strict=True):
        assert_identical(result, right)


class Index:
    def __init__(self, value: int):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("case", CALLS)
def test_subclasses_without_a_meaning_of_their_own(case, backend):
    arguments = good_call(case, **taken(backend)) | {"backend": backend}
    arguments.pop("out", None)
    expected = getattr(ag, CALLS[case][0])(**arguments)
    arguments |= {name: value.view(Noted) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for result, right in zip(getattr(ag, CALLS[case][0])(**arguments), expected, strict=True):
        assert type(result) is type(right)
        if right is not None:
            assert_identical(result, right)


@pytest.mark.parametrize("case", CALLS)
def test_meanings_are_not_lost_in_lists(case, backend):
    operator, arguments = CALLS[case][0], good_call(case) | {"backend": backend}
    if operator == WHOLE:
        arguments |= {"reduction": "none", "grad_loss": np.ones(BT, np.float32)}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            error = outcome(getattr(ag, operator), **arguments | {name: [np.ma.array(row) for row in value]})
            assert type(error) is TYPE
            assert str(error).startswith(f"{operator}: {name}: expected an array without a mask")


def test_integers_of_any_kind(backend):
    arguments = good_call("statistics", **taken(backend)) | {"backend": backend}
    expected = ag.fused_linear_online_max_sum(**arguments)
    for kind in (np.int16, np.uint64, Index, np.array):
        more = {name: kind(arguments[name]) for name in ("vocab_start_index", "vocab_end_index")}
        for result, right in zip(ag.fused_linear_online_max_sum(**arguments | more)[:5], expected[:5], strict=True):
            assert_identical(result, right)
    arguments = good_call("whole", **taken(backend)) | {"backend": backend, "workspace_bytes": 2**23}
    expected = ag.linear_cross_entropy(**arguments)
    for kind in (np.int32, np.int64, Index, np.array):
        more = {name: kind(arguments[name]) for name in ("vocab_start_index", "ignore_index", "workspace_bytes")}
        for result, right in zip(ag.linear_cross_entropy(**arguments | more), expected, strict=True):
            assert_identical(result, right)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, V), (3, 3), (2**62, 2**62 + V), (2**63 - 1 - V, 2**63 - 1)])
def test_bounds_of_the_vocabulary(start, end, backend):
    """Shards may be empty, begin beyond 32 bits, and end at the largest id."""
    x, w = np.ones((4, H), np.float16), np.ones((V, H), np.float16)
    for dtype in (np.int32, np.int64):
        limits = np.iinfo(dtype)
        target = np.clip([start, end, limits.min, limits.max], limits.min, limits.max).astype(dtype)
        result = ag.fused_linear_online_max_sum(x, w, target, start, end, backend=backend)
        masked = [not start <= int(t) < end for t in target]
        assert result.target_mask.tolist() == [sum(m << i for i, m in enumerate(masked))]
        assert result.masked_target.tolist() == [
            0 if m else int(t) - start for m, t in zip(masked, target, strict=True)
        ]
        assert result.masked_target.dtype == dtype


def test_targets_beyond_32_bits(backend):
    x, w = np.ones((3, H), np.float16), np.arange(V * H, dtype=np.float16).reshape(V, H) / 10
    plain = ag.linear_cross_entropy(x, w, np.array([0, 5, -100]), backend=backend)
    far = np.array([2**40, 2**40 + 5, -(2**63)])
    results = ag.linear_cross_entropy(x, w, far, ignore_index=-(2**63), vocab_start_index=2**40, backend=backend)
    for result, right in zip(results, plain, strict=True):
        assert_identical(result, right)


def test_numbers_of_any_kind_are_upstream_gradients(backend):
    arguments = good_call("whole", **taken(backend)) | {"backend": backend, "grad_loss": 2.0}
    expected = ag.linear_cross_entropy(**arguments)
    for number in (2, np.float16(2), np.array(2.0), np.int64(2), DTYPES["bfloat16"].type(2)):
        for result, right in zip(ag.linear_cross_entropy(**arguments | {"grad_loss": number}), expected, strict=True):
            assert_identical(result, right)
    arguments |= {"reduction": "none"}
    expected = ag.linear_cross_entropy(**arguments)
    for dtype in DTYPES.values():
        more = {"grad_loss": np.full(BT, 2).astype(dtype)}
        for result, right in zip(ag.linear_cross_entropy(**arguments | more), expected, strict=True):
            assert_identical(result, right)


@pytest.mark.parametrize("value", [[1, 2], np.ones(BT - 1), np.ones((BT, 1)), np.ones(BT, int), ["x"] * BT, Hostile()])
def test_upstream_gradients_of_rows(value, backend):
    arguments = good_call("whole") | {"backend": backend, "grad_loss": value}
    for reduction in ("none", "sum", "mean"):
        error = outcome(ag.linear_cross_entropy, **arguments | {"reduction": reduction})
        assert isinstance(error, INVALID)
        number = "" if reduction == "none" else f"a real number, as reduction is {reduction!r}, got "
        assert str(error).startswith(f"{WHOLE}: grad_loss: expected {number}")


def test_outs_of_any_kind_of_sequence(backend):
    arguments = good_call("recomputed", **taken(backend)) | {"backend": backend}
    outs = arguments["out"]
    for given in (list(outs), (None, outs[1]), [outs[0], None], (None, None), None):
        results = ag.fused_linear_cross_entropy_loss_grad(**arguments | {"out": given})
        for result, out in zip(results, given or (None, None), strict=True):
            assert result is out or out is None


def test_results_have_names(backend):
    for case, (operator, _) in CALLS.items():
        results = getattr(ag, operator)(**good_call(case, **taken(backend)) | {"backend": backend})
        names = table.OPERATORS[operator].results[: len(results)]  # further results of a loss are not requested
        assert getattr(results, "_fields", names) == names
        assert isinstance(results, tuple)


def test_bytes_of_a_mask_behind_the_last_row_cost_nothing(backend):
    mask = np.broadcast_to(np.uint8(0), 2**44)
    ones = np.ones(4, np.float32)
    arguments = (ones, np.eye(4, dtype=np.float16), np.ones((5, 4), np.float16), mask, np.zeros(4, int))
    input_grad, _ = ag.fused_linear_cross_entropy_loss_grad(
        *arguments, logits_max=ones, sum_exp_logits=5 * ones, backend=backend
    )
    assert np.isfinite(input_grad).all()


def test_strings_of_other_classes():
    class Reduction(str):
        def __eq__(self, other) -> bool:
            return self.lower() == other

        __hash__ = str.__hash__

    arguments = np.eye(3, 2), np.eye(4, 2), np.array([0, 3, 1])
    for reduction in (np.str_("sum"), Reduction("SUM")):
        result = ag.linear_cross_entropy(*arguments, reduction=reduction, backend=np.str_("cpu"))
        assert result.loss == ag.linear_cross_entropy(*arguments, reduction="sum").loss


# ---- arguments that change while they are checked --------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["masked_target", "target_mask", "grad", "input", "weight", "sum_exp_logits"])
@pytest.mark.parametrize("argument", ["filter_eps", "workspace_bytes", "label_smoothing"])
def test_arrays_that_change_while_they_are_checked(changed, argument):
    """The conversion of one argument may shrink an array that was checked before. No call reads beyond its end."""
    arguments = {name: value for name, value in good_call("recomputed").items() if name != "out"}
    arguments = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}

    class Number:
        def __float__(self) -> float:
            arguments[changed].resize((1,) * arguments[changed].ndim, refcheck=False)
            return 0.0

        def __index__(self) -> int:
            return int(self.__float__()) + table.MIN_WORKSPACE_BYTES

    with pytest.raises(ag.ParamInvalidError) as info:
        ag.fused_linear_cross_entropy_loss_grad(**arguments | {argument: Number()})
    assert info.value.code == 161002


def test_a_list_of_outs_may_change_while_it_is_looked_at():
    arguments = {name: value for name, value in good_call("recomputed").items() if name != "out"}
    outs = [np.empty_like(arguments["input"]), np.empty_like(arguments["weight"])]
    expected = ag.fused_linear_cross_entropy_loss_grad(**arguments)
    given: list[np.ndarray] = []

    class Clearing(type):
        def __getattribute__(cls, name):
            given.clear()
            return super().__getattribute__(name)

    class Kind(np.ndarray, metaclass=Clearing):
        pass

    given.extend([out.view(Kind) for out in outs])
    ag.fused_linear_cross_entropy_loss_grad(**arguments, out=given)
    for out, each in zip(outs, expected):
        assert_identical(out, each)
