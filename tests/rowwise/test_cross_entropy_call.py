"""Test calls of the cross-entropy of rows: its result, empty arguments, what it refuses, and its backends."""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from samples import DTYPES, generator

import ascend_grad as ag
from ascend_grad import LossResult
from ascend_grad.operators import table
from ascend_grad.operators.options import OUTPUTS


def test_fields_of_the_result():
    x, target = np.eye(3, dtype=np.float32), np.array([0, 1, 0])
    plain = ag.cross_entropy(x, target)
    assert plain._fields == ("loss", "input_grad")
    assert (plain.lse, plain.correct) == (None, None)
    result = ag.cross_entropy(x, target, outputs=["correct", "lse"], return_grad=False)
    loss, gradient, correct, lse = result
    assert result._fields == ("loss", "input_grad", "correct", "lse")
    assert gradient is None
    assert (result.correct, result.entropy) == (correct, None)
    assert correct == 2
    assert correct.dtype == np.int64
    assert loss.dtype == lse.dtype == np.float32
    assert isinstance(result, LossResult)
    assert pickle.loads(pickle.dumps(result))._fields == result._fields
    assert result._replace(lse=None, loss=1) == (1, None, correct, None)
    with pytest.raises(ValueError, match="unexpected field names"):
        result._replace(los=0)
    assert type(result)._make(result) == result
    assert repr(result._make("abcd")) == "LossResult(loss='a', input_grad='b', correct='c', lse='d')"
    assert "each row's logits" in type(result).lse.__doc__
    match result:
        case LossResult(loss=first) if type(result).__match_args__ == result._fields:
            assert first is loss
        case _:
            pytest.fail("the result does not match its class")


def test_ties_and_nan_are_predicted_as_numpy_does(dtype, cpu_engine):
    random = generator("ties", dtype)
    for shape in ((50, 5), (7, 300), (2, 20_000)):
        x = np.round(2 * random.standard_normal(shape)).astype(DTYPES[dtype])
        x[1, [2, 4]] = np.nan
        result = cpu_engine.call("cross_entropy", x, np.zeros(shape[0], int), outputs=("predicted",), num_threads=2)
        assert np.array_equal(result.predicted, np.argmax(x.astype(np.float64), axis=-1))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.5}, {"reduction": "sum", "outputs": ("lse", "entropy")}])
def test_a_logit_of_rank_0_is_certain(options, dtype, cpu_engine):
    result = cpu_engine.call("cross_entropy", np.array(1.5, DTYPES[dtype]), 0, 0, **options)
    assert (result.loss, result.input_grad, result.input_grad.shape) == (0, 0, ())
    assert (result.lse, result.entropy) == ((1.5, 0) if "outputs" in options else (None, None))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0, 3)])
def test_empty(shape, backend):
    rows = shape[:-1]
    for reduction, loss in (("mean", np.nan), ("sum", 0.0)):
        result = ag.cross_entropy(
            np.ones(shape, np.float32),
            np.zeros(rows, int),
            reduction=reduction,
            outputs=tuple(OUTPUTS),
            backend=backend,
        )
        assert result.loss.shape == ()
        np.testing.assert_equal(result.loss.item(), loss)
        assert result.input_grad.shape == shape
        assert result.lse.shape == result.predicted.shape == rows
        assert result.correct == 0
    assert ag.cross_entropy(np.ones(shape), np.zeros(rows, int), reduction="none", backend=backend).loss.shape == rows
    with pytest.raises(ag.ParamInvalidError, match="at least one element along axis 1"):
        ag.cross_entropy(np.ones((2, 0)), np.full(2, -100), backend=backend)


# ---- what is refused -------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {"input": np.ones((2, 3), np.float32), "target": np.array([0, 2])}


FAULTS = (
    ("input", None, "ParamNullptrError"),
    ("target", None, "ParamNullptrError"),
    ("input", np.ones((2, 3), complex), "ParamTypeError"),
    ("target", np.zeros(2), "ParamTypeError"),
    ("target", np.zeros(2, bool), "ParamTypeError"),
    ("axis", 2, "ParamInvalidError"),
    ("target", np.zeros(3, int), "ParamInvalidError"),
    ("target", np.zeros((2, 1), int), "ParamInvalidError"),
    ("target", np.array([0, 3]), "ParamInvalidError"),
    ("target", np.array([-1, 0]), "ParamInvalidError"),
    ("reduction", "average", "ParamInvalidError"),
    ("reduction", 1, "ParamTypeError"),
    ("ignore_index", 1.0, "ParamTypeError"),
    ("class_weight", np.ones(2), "ParamInvalidError"),
    ("class_weight", np.ones(3, int), "ParamTypeError"),
    ("token_weight", np.ones(3), "ParamInvalidError"),
    ("target_prob", np.ones(2, np.int64), "ParamTypeError"),
    ("target_prob", np.ones(2, np.float32), "ParamInvalidError"),
    ("label_smoothing", 1.5, "ParamInvalidError"),
    ("label_smoothing", -0.1, "ParamInvalidError"),
    ("label_smoothing", np.nan, "ParamInvalidError"),
    ("lse_square_scale", np.inf, "ParamInvalidError"),
    ("temperature", 0.0, "ParamInvalidError"),
    ("temperature", np.array([1.0, -1.0]), "ParamInvalidError"),
    ("temperature", np.ones(3), "ParamInvalidError"),
    ("temperature", "hot", "ParamTypeError"),
    ("denominator", 0.0, "ParamInvalidError"),
    ("grad_loss", np.ones(2), "ParamTypeError"),
    ("grad_lse", np.ones(3), "ParamInvalidError"),
    ("grad_entropy", np.ones(2, int), "ParamTypeError"),
    ("outputs", ("loss",), "ParamInvalidError"),
    ("outputs", ("lse", "lse"), "ParamInvalidError"),
    ("outputs", "lse", "ParamTypeError"),
    ("return_grad", 1, "ParamTypeError"),
    ("out", np.ones((3, 2)), "ParamInvalidError"),
    ("out", [1.0], "ParamTypeError"),
)


@pytest.mark.parametrize(("name", "value", "error"), FAULTS)
def test_faults(name, value, error):
    messages = set()
    for backend in ("cpu", "reference", "auto"):
        with pytest.raises(getattr(ag, error)) as info:
            ag.cross_entropy(**GOOD | {name: value}, backend=backend)
        assert info.value.code == (161001 if error == "ParamNullptrError" else 161002)
        messages.add(str(info.value))
    (message,) = messages
    assert message.startswith("cross_entropy: ")
    assert ": expected " in message
    assert ", got " in message
    if name != "out":
        for question in (ag.explain, ag.workspace_size):
            with pytest.raises(getattr(ag, error)):
                question("cross_entropy", **GOOD | {name: value})


def test_faults_of_two_arguments():
    sparse = GOOD | {"target": np.array([[0], [2]]), "target_prob": np.ones((2, 1), np.float32)}
    for arguments, text in (
        (sparse | {"outputs": ("correct",)}, "no output of a single target, as target_prob is given"),
        (sparse | {"grad_log_prob": np.ones(2)}, r"grad_log_prob: expected shape \(2, 1\) as target has, got \(2,\)"),
        (sparse | {"target_prob": 1.0}, r"target_prob: expected shape \(2, 1\) as target has, got \(\)"),
        (GOOD | {"target_prob": 0}, r"target: expected shape \(2, K\), K entries for each row of input"),
        (sparse | {"target_prob": np.ones((2, 2), np.float32)}, "target_prob: expected shape"),
        (
            GOOD | {"target_prob": np.ones((2, 3))},
            r"K entries for each row of input, got \(2,\); pass probabilities of all classes as target, ",
        ),
        (GOOD | {"return_grad": False, "out": np.ones((2, 3))}, "out: expected None"),
        (GOOD | {"axis": 0}, r"target: expected shape \(3,\), that of input without axis 0, got \(2,\)"),
        (GOOD | {"token_weight": np.ones(3)}, r"token_weight: expected shape \(2,\), that of input without axis 1"),
        (GOOD | {"grad_loss": np.ones(2)}, "grad_loss: expected a real number, as reduction is 'mean', got "),
    ):
        with pytest.raises(ag.ParamInvalidError, match=text):
            ag.cross_entropy(**arguments)


@pytest.mark.parametrize("function", [ag.cross_entropy, lambda x, t, **more: ag.linear_cross_entropy(x, x, t, **more)])
def test_outputs_that_are_no_names(function):
    with pytest.raises(ag.ParamTypeError, match="cross_entropy: outputs: expected a tuple of names"):
        function(np.eye(3), np.arange(3), outputs=np.array(["lse"]))


def test_no_entries_in_a_row_of_several_targets():
    with pytest.raises(ag.ParamInvalidError, match="target: expected at least one entry for each row"):
        ag.cross_entropy(np.eye(2), np.zeros((2, 0), int), target_prob=np.zeros((2, 0)))


def test_nothing_is_written_before_everything_is_checked():
    out = np.full((2, 3), 7.0)
    with pytest.raises(ag.ParamInvalidError):
        ag.cross_entropy(np.ones((2, 3)), np.array([0, 5]), out=out)
    assert np.all(out == 7)


def test_targets_that_change_during_a_call():
    """Another thread moves targets out of the row. Calls compute or raise an error, and write nothing elsewhere."""
    x, target = np.zeros((20_000, 16), np.float32), np.zeros(20_000, np.int64)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            target[10_000:] = 10**12
            target[10_000:] = 0

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(300):
            with contextlib.suppress(ag.ParamInvalidError):
                assert np.isfinite(ag.cross_entropy(x, target, num_threads=1).loss)
    finally:
        stop.set()
        other.join()


# ---- the operator ----------------------------------------------------------------------------------------------------


def test_the_operator_is_described_and_public():
    for operator in table.LOSSES:
        assert operator is table.OPERATORS[operator.name]
        assert operator.device_name is None
        assert operator.name in ag.__all__
