"""Test calls as people write them, at every door: NumPy, PyTorch, JAX and dask.

A situation is a call with its result, or with the words of its error. The words say what to do.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.special

import ascend_grad as ag

RNG = np.random.default_rng(42)
LOGITS = RNG.standard_normal((4, 7)).astype(np.float32)
HIDDEN = RNG.standard_normal((4, 3)).astype(np.float32)
WEIGHT = RNG.standard_normal((7, 3)).astype(np.float32)
TARGET = np.array([1, 2, 0, 6])
ONE_HOT = np.eye(7, dtype=np.int64)[TARGET]
LOG_PROB = scipy.special.log_softmax(LOGITS.astype(np.float64), -1)
LOSSES = -LOG_PROB[np.arange(4), TARGET]
LINEAR_LOG_PROB = scipy.special.log_softmax(HIDDEN.astype(np.float64) @ WEIGHT.T, -1)
LINEAR_LOSSES = -LINEAR_LOG_PROB[np.arange(4), TARGET]
PROB = scipy.special.softmax(RNG.standard_normal((4, 7)), -1).astype(np.float32)
INTEGERS = np.array([[1, 2, 3], [0, 5, 0]])


class Door(NamedTuple):
    """A module with the library's functions, and the conversions of its arrays."""

    name: str
    module: Any
    array: Callable[[np.ndarray], Any]
    numbers: Callable[[Any], np.ndarray]

    def loss(self, result: Any) -> np.ndarray:
        """Return the loss among the results of a loss."""
        return self.numbers(getattr(result, "loss", result))


def door(name: str) -> Door:
    """Return a door, or skip the test if its library is missing."""
    if name == "numpy":
        return Door(name, ag, np.asarray, np.asarray)
    library = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "dask": "dask.array"}[name])
    module = importlib.import_module(f"ascend_grad.{name}")
    if name == "torch":
        return Door(name, module, library.from_numpy, lambda tensor: tensor.detach().numpy())
    if name == "jax":
        return Door(name, module, library.asarray, np.asarray)
    return Door(name, module, library.from_array, lambda array: np.asarray(array.compute()))


DOORS = ("numpy", "torch", "jax", "dask")
OTHERS = ("numpy", "jax", "dask")


class Value(NamedTuple):
    """A call of a door's module, and its result in float64. Floating results of integers are float64 in NumPy."""

    call: Callable[[Door], Any]
    right: Any
    doors: Sequence[str] = DOORS


class Refusal(NamedTuple):
    """A call of a door's module, and words of its error. `kind` is its class."""

    call: Callable[[Door], Any]
    words: str
    doors: Sequence[str] = DOORS
    kind: type[Exception] = ag.ParamInvalidError


def cross_entropy(target: np.ndarray, logits: np.ndarray = LOGITS, **options: Any) -> Callable[[Door], Any]:
    return lambda d: d.module.cross_entropy(d.array(logits), d.array(target), **options)


def linear(
    target: np.ndarray, hidden: np.ndarray = HIDDEN, weight: np.ndarray = WEIGHT, **options: Any
) -> Callable[[Door], Any]:
    return lambda d: d.module.linear_cross_entropy(d.array(hidden), d.array(weight), d.array(target), **options)


def layer() -> Any:
    return pytest.importorskip("torch").nn.Linear(3, 7)


def masked_tensor() -> Any:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about a prototype
        return torch.masked.masked_tensor(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


SITUATIONS = {
    # integers and truth values as logits
    "softmax of integers": Value(
        lambda d: d.numbers(d.module.softmax(d.array(INTEGERS))), scipy.special.softmax(INTEGERS, -1), OTHERS
    ),
    "softmax of truth values": Value(
        lambda d: d.numbers(d.module.softmax(d.array(INTEGERS > 1))),
        scipy.special.softmax(1 * (INTEGERS > 1), -1),
        OTHERS,
    ),
    "softmax of a list": Value(lambda d: d.module.softmax([1, 2, 3]), scipy.special.softmax([1, 2, 3]), ("numpy",)),
    "softmax of integers in torch": Refusal(
        lambda d: d.module.softmax(d.array(INTEGERS)),
        r"input: .*got int64; input\.float\(\) converts it$",
        ("torch",),
    ),
    "loss of integers": Value(
        lambda d: d.loss(cross_entropy(TARGET, INTEGERS.repeat(2, 0).repeat(3, 1)[:, :7])(d)),
        -scipy.special.log_softmax(INTEGERS.repeat(2, 0).repeat(3, 1)[:, :7], -1)[np.arange(4), TARGET].mean(),
        OTHERS,
    ),
    "gradient of integers": Refusal(
        lambda d: d.module.softmax_backward(d.array(INTEGERS), d.array(INTEGERS)),
        r"grad_output: expected dtype float32, .* got int64; grad_output.astype\(numpy.float32\) converts it$",
        ("numpy",),
    ),
    # targets
    "targets of eight bits": Value(lambda d: d.loss(cross_entropy(TARGET.astype(np.int8))(d)), LOSSES.mean()),
    "targets without sign": Value(lambda d: d.loss(linear(TARGET.astype(np.uint8))(d)), LINEAR_LOSSES.mean()),
    "a column of targets": Refusal(
        cross_entropy(TARGET[:, None], reduction="sum"),
        r"target: expected shape \(4,\), got .*4, 1.*squeeze\(-1\)",
        OTHERS,
    ),
    "one-hot rows": Refusal(cross_entropy(ONE_HOT), r"target: .*got .*4, 7.*one-hot.*argmax\(-1\)", OTHERS),
    "one-hot rows with leading dimensions": Refusal(
        linear(ONE_HOT.reshape(2, 2, 7), HIDDEN.reshape(2, 2, 3)),
        r"target: .*got \(2, 2, 7\); if rows are one-hot, pass target.argmax\(-1\)$",
        ("numpy", "jax"),
    ),
    "two classes of two": Value(
        lambda d: d.loss(cross_entropy(ONE_HOT[:, :2], LOGITS[:, :2], target_prob=d.array(PROB[:, :2]))(d)),
        -(PROB[:, :2] * np.take_along_axis(scipy.special.log_softmax(LOGITS[:, :2], -1), ONE_HOT[:, :2], -1))
        .sum(-1)
        .mean(),
    ),
    "floating classes": Refusal(
        cross_entropy(TARGET.astype(np.float64)),
        r"target: expected an integer dtype, or shape \(4, 7\), as floating targets are probabilities of all classes, "
        r"got float\d\d of shape \(4,\); target.astype\(numpy.int64\) converts it to classes$",
        OTHERS,
    ),
    "floating targets of several layers": Refusal(
        linear(PROB[None, None]),
        r"target: expected an integer dtype, or shape \(4, 7\), as floating targets are probabilities of all classes, "
        r"got float32 of shape \(1, 1, 4, 7\)$",
        ("numpy", "jax"),
    ),
    "floating classes in torch": Refusal(
        cross_entropy(TARGET.astype(np.float64)), r"target: expected an integer dtype.*target.long\(\)", ("torch",)
    ),
    "a gradient of tensors of integers": Refusal(
        lambda d: ag.softmax_backward(d.array(INTEGERS), d.array(INTEGERS)),
        r"grad_output: .* got int64; grad_output.to\(torch.float32\) converts it$",
        ("torch",),
        ag.ParamTypeError,
    ),
    "a column of floating classes": Refusal(
        cross_entropy(TARGET[:, None].astype(np.float32)),
        r"target: expected shape \(4, 7\), .*; for class ids, pass target.squeeze\(-1\)\.(astype\(int\)|long\(\))$",
    ),
    "a column of classes in a layer of torch": Refusal(
        linear(TARGET[:, None]), r"got \(4, 1\); for class ids, pass target.squeeze\(-1\)$", ("torch",)
    ),
    "one-hot rows in a layer of torch": Refusal(
        linear(ONE_HOT), r"got \(4, 7\); if one-hot, pass target.argmax\(-1\)$", ("torch",)
    ),
    "floating classes in a layer of torch": Refusal(
        linear(TARGET.astype(np.float32)), r"got \(4,\); target.long\(\) converts it to classes$", ("torch",)
    ),
    "swapped arguments": Refusal(
        cross_entropy(LOGITS, TARGET), r": expected .*; are input and target swapped\?$", kind=ag.ParamTypeError
    ),
    "missing classes": Refusal(
        cross_entropy(np.array([1, 2, np.nan, 0])),
        r"target: expected an integer dtype, .* got float64 .*; to ignore rows with NaN, pass .*nan_to_num\(.*\).*$",
        ("numpy", "torch"),
    ),
    "names of classes": Refusal(
        lambda d: d.module.cross_entropy(LOGITS, list("abca")),
        r"target: .* got <U1; numpy.unique\(target, return_inverse=True\)\[1\] converts labels to classes$",
        ("numpy",),
    ),
    "names of classes as objects": Refusal(
        lambda d: d.module.cross_entropy(LOGITS, np.array(list("abca"), object)),
        r"target: .* got object; numpy.unique\(target, return_inverse=True\)\[1\] converts labels to classes$",
        ("numpy",),
    ),
    "classes as objects": Refusal(
        lambda d: d.module.cross_entropy(LOGITS, TARGET.astype(object)),
        r"target: .* got object; target.astype\(numpy.int64\) converts it to classes$",
        ("numpy",),
    ),
    "logits as objects": Refusal(
        lambda d: d.module.softmax(LOGITS.astype(object)),
        r"got object; input.astype\(numpy.float64\) converts numbers$",
        ("numpy",),
    ),
    "ignored classes without sign": Refusal(
        lambda d: d.module.cross_entropy(LOGITS, TARGET.astype(np.int64).astype(np.uint64) - np.uint64(2)),
        r"got 18446744073709551615 at index \(0,\) \(astype\(numpy.int64\) converts it to -1\)$",
        ("numpy",),
    ),
    "masked target": Refusal(
        lambda d: d.module.cross_entropy(LOGITS, np.ma.masked_array(TARGET)),
        r"target: .*got numpy.ma.MaskedArray; pass target.filled\(-100\), which ignores masked rows$",
        ("numpy",),
        ag.ParamTypeError,
    ),
    "probabilities of all classes": Value(lambda d: d.loss(cross_entropy(PROB)(d)), -(PROB * LOG_PROB).sum(-1).mean()),
    "probabilities of all classes with a softcap": Value(
        lambda d: d.loss(cross_entropy(PROB, softcap=2.0, logit_scale=-0.5)(d)),
        -(PROB * scipy.special.log_softmax(2 * np.tanh(LOGITS.astype(np.float64) / -4), -1)).sum(-1).mean(),
    ),
    "probabilities of all classes of a layer": Value(
        lambda d: d.loss(
            linear(PROB.reshape(2, 2, 7), HIDDEN.reshape(2, 2, 3), reduction="none", label_smoothing=0.1)(d)
        ),
        -((0.9 * PROB + 0.1 / 7) * LINEAR_LOG_PROB).sum(-1).reshape(2, 2),
    ),
    "the log-probability of probabilities": Refusal(
        linear(PROB, outputs=("log_prob",)),
        "outputs: expected no output of a single target, as target holds probabilities of all classes, got 'log_prob'",
    ),
    "probabilities of too few classes": Refusal(
        cross_entropy(PROB[:, :6]),
        r"target: expected shape \(4, 7\), as floating targets are probab",
    ),
    "a target that is no class": Refusal(
        lambda d: d.loss(cross_entropy(TARGET + 5)(d)),
        r"target: expected values in \[0, 7\) or -100, got 7",
        ("numpy", "dask"),
    ),
    # leading dimensions
    "leading dimensions": Value(
        lambda d: d.loss(linear(TARGET.reshape(2, 2), HIDDEN.reshape(2, 2, 3), reduction="none")(d)),
        LINEAR_LOSSES.reshape(2, 2),
    ),
    "leading dimensions of the input alone": Refusal(
        linear(TARGET, HIDDEN.reshape(2, 2, 3)),
        r"target: expected shape \(2, 2\), that of input without its last dimension, got \(4,\); "
        r"pass target.reshape\(\(2, 2\)\)$",
        ("numpy", "jax"),
    ),
    "leading dimensions of the input alone in torch": Refusal(
        linear(TARGET, HIDDEN.reshape(2, 2, 3)),
        r"got \(4,\); pass target.reshape\(\(2, 2\)\)$",
        ("torch",),
    ),
    "leading dimensions of the input, and several targets": Refusal(
        lambda d: linear(INTEGERS[:, :2].reshape(4, 1), HIDDEN.reshape(2, 2, 3), target_prob=d.array(PROB[:, :1]))(d),
        r"target: expected shape \(2, 2, K\), .* got \(4, 1\); pass target.reshape\(\(2, 2, 1\)\)$",
        ("numpy", "jax"),
    ),
    "leading dimensions of the target alone": Refusal(
        linear(TARGET.reshape(2, 2)),
        r"target: expected shape \(BT = 4\), got \(2, 2\); pass target.reshape\(-1\)$",
        ("numpy", "jax"),
    ),
    "leading dimensions of token weights alone": Refusal(
        lambda d: linear(TARGET, token_weight=d.array(PROB[:2, :2]))(d),
        r"token_weight: expected shape \(BT = 4\), got \(2, 2\); pass token_weight.reshape\(-1\)$",
        ("numpy", "jax"),
    ),
    "an operator of the device's documents": Refusal(
        lambda d: d.module.fused_linear_online_max_sum(HIDDEN.reshape(2, 2, 3), WEIGHT, TARGET, 0, 6),
        r"input: expected shape \(BT, H\), got \(2, 2, 3\); pass input.reshape\(-1, 3\)$",
        ("numpy",),
    ),
    # shapes and dtypes
    "classes along axis 1": Refusal(
        cross_entropy(np.zeros((2, 5), int), np.zeros((2, 6, 5), np.float32)),
        r"target: .*got \(2, 5\); if axis 1 has the classes, as in PyTorch, pass axis=1$",
        OTHERS,
    ),
    "classes along the last axis": Refusal(
        cross_entropy(np.zeros((2, 5), int), np.zeros((2, 5, 6), np.float32)),
        r"target: .*got \(2, 5\); if axis 2 has the classes, pass input.movedim\(2, 1\)$",
        ("torch",),
    ),
    "a weight of another dtype": Refusal(
        linear(TARGET, weight=WEIGHT.astype(np.float16)),
        r"weight: expected .*float16; \w+\.(astype|to)\(input.dtype\) converts it$",
        kind=ag.ParamTypeError,
    ),
    "a transposed weight in torch": Refusal(
        linear(TARGET, weight=WEIGHT.T), r"linear_weight: .* \(did you mean linear_weight.T\?\)$", ("torch",)
    ),
    "a mask of numbers": Refusal(
        lambda d: d.module.scaled_masked_softmax(
            d.array(LOGITS[None, None]), d.array(np.zeros((1, 1, 4, 7), np.float32)), 1.0
        ),
        r"mask: expected dtype bool, got float32; mask\.(astype\(bool\)|bool\(\)) converts it$",
    ),
    "a matrix for scaled_masked_softmax": Refusal(
        lambda d: d.module.scaled_masked_softmax(d.array(LOGITS), d.array(LOGITS > 9), 1.0),
        r"x: expected rank 4, got rank 2; x\[None, None\] has rank 4$",
    ),
    "all axes": Refusal(
        lambda d: d.module.softmax(d.array(LOGITS), None),
        r"(axis|dim): expected an int, got None; for all axes, SciPy's default, pass input.reshape\(-1\)$",
        ("numpy", "torch", "jax"),
    ),
    "an array of NumPy in torch": Refusal(
        lambda d: d.module.softmax(LOGITS),
        r"input: .*; pass torch.from_numpy\(input\), or use ascend_grad.softmax$",
        ("torch",),
    ),
    "a layer as weight": Refusal(
        lambda d: d.module.linear_cross_entropy(d.array(HIDDEN), layer(), d.array(TARGET)),
        r"weight: .*; pass layer.weight$",
        ("numpy", "torch"),
    ),
    "a masked tensor": Refusal(
        lambda d: d.module.softmax(masked_tensor()),
        r"input: expected a tensor without a mask, .*; pass input.to_tensor\(value\)$",
        ("torch",),
    ),
    # modules and functions of other packages
    **{
        f"a module of {name}": Refusal(lambda d, call=call: call(d), words, ("torch",), kind)
        for name, call, words, kind in (
            (
                "a list of weights",
                lambda d: d.module.LinearCrossEntropyLoss(3, 7, weight=[1.0] * 7),
                "LinearCrossEntropyLoss: weight: expected a torch.Tensor, got list",
                ag.ParamTypeError,
            ),
            (
                "a tensor that is no parameter",
                lambda d: d.module.LinearCrossEntropyLoss(3, 7, linear_weight=d.array(WEIGHT)),
                r"linear_weight: expected a torch.nn.Parameter, .*; pass torch.nn.Parameter\(linear_weight\)$",
                ag.ParamTypeError,
            ),
            (
                "a layer",
                lambda d: d.module.LinearCrossEntropyLoss(3, 7, linear_weight=layer()),
                r"linear_weight: expected a torch.nn.Parameter, .*; pass layer.weight$",
                ag.ParamTypeError,
            ),
            (
                "a text as length",
                lambda d: d.module.LinearCrossEntropyLoss("3", 6),
                "LinearCrossEntropyLoss: in_features: expected an int, got str '3'",
                ag.ParamTypeError,
            ),
            (
                "a negative length",
                lambda d: d.module.LinearCrossEntropyLoss(3, -6),
                "LinearCrossEntropyLoss: num_classes: expected an int of at least 0, got -6",
                ag.ParamInvalidError,
            ),
        )
    },
    "return_lse that is no truth value": Refusal(
        lambda d: d.module.compat.cce.linear_cross_entropy(*map(d.array, (HIDDEN, WEIGHT, TARGET)), return_lse="x"),
        "compat.cce.linear_cross_entropy: return_lse: expected True or False, got str 'x'",
        ("torch",),
        ag.ParamTypeError,
    ),
    "ignore_index that is no number": Refusal(
        lambda d: d.module.compat.cce.linear_cross_entropy(*map(d.array, (HIDDEN, WEIGHT, TARGET)), ignore_index=None),
        "compat.cce.linear_cross_entropy: ignore_index: expected an int, got None",
        ("torch",),
        ag.ParamTypeError,
    ),
    # options
    "a misspelled option": Refusal(
        lambda d: cross_entropy(TARGET, label_smooting=0.1)(d),
        r"argument 'label_smooting'. Did you mean 'label_smoothing'\?$",
        ("torch", "jax", "dask"),
        TypeError,
    ),
    "the end of two options' names": Refusal(
        lambda d: cross_entropy(TARGET, weight=1.0)(d),
        r"argument 'weight'. Did you mean 'class_weight' or 'token_weight'\?$",
        ("jax", "dask"),
        TypeError,
    ),
    "a transposed weight": Refusal(
        linear(TARGET, weight=WEIGHT.T),
        r"weight: expected shape \(V, H = 3\), got \(3, 7\) \(did you mean weight.T\?\)",
        OTHERS,
    ),
    "masked array": Refusal(
        lambda d: d.module.softmax(np.ma.masked_array(LOGITS)),
        r"input: expected an array without a mask, .*; pass input.filled\(value\)$",
        ("numpy",),
        ag.ParamTypeError,
    ),
    # scalars and results
    "twice a result": Refusal(
        lambda d: 2 * ag.cross_entropy(LOGITS, TARGET), r"use its field \.loss$", ("numpy",), TypeError
    ),
    "a NumPy number times a result": Refusal(
        lambda d: np.float32(2) * ag.cross_entropy(LOGITS, TARGET), r"use its field \.loss$", ("numpy",), TypeError
    ),
    "a result plus a number": Refusal(
        lambda d: ag.cross_entropy(LOGITS, TARGET) + 1, r"use its field \.loss$", ("numpy",), TypeError
    ),
    **{
        f"{what} {names}": Refusal(
            lambda d, call=call, arithmetic=arithmetic: arithmetic(call()),
            rf"a {kind} is a named tuple \({names}\), not a number; use its fields, which are arrays$",
            ("numpy",),
            TypeError,
        )
        for what, arithmetic in {
            "twice": lambda result: 2 * result,
            "a number of NumPy times": lambda result: np.float32(2) * result,
            "plus 1": lambda result: result + 1,
            "1 plus": lambda result: 1 + result,
        }.items()
        for kind, names, call in (
            ("LinearTopK", "log_prob, index", lambda: ag.linear_top_k(HIDDEN, WEIGHT, 2)),
            (
                "LinearCrossEntropyGradients",
                "input_grad, weight_grad, bias_grad",
                lambda: ag.linear_cross_entropy_backward(HIDDEN, WEIGHT, TARGET, lse=LOSSES, grad_loss=1.0),
            ),
            (
                "OnlineMaxSum",
                "logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, vocab_parallel_logits",
                lambda: ag.fused_linear_online_max_sum(HIDDEN, WEIGHT, TARGET, 0, 7),
            ),
        )
    },
    "a loss in a formula": Value(lambda d: 2 * ag.cross_entropy(LOGITS, TARGET).loss, 2 * LOSSES.mean(), ("numpy",)),
    # the largest log-probabilities
    "the largest log-probabilities": Value(
        lambda d: d.numbers(d.module.linear_top_k(d.array(HIDDEN.reshape(2, 2, 3)), d.array(WEIGHT), 3).log_prob),
        -np.sort(-LINEAR_LOG_PROB, -1)[:, :3].reshape(2, 2, 3),
    ),
    "the indices of the largest": Value(
        lambda d: d.numbers(d.module.linear_top_k(d.array(HIDDEN), d.array(WEIGHT), 7).index),
        np.argsort(-LINEAR_LOG_PROB, -1),
    ),
    # ranges
    "too many of the largest": Refusal(
        lambda d: d.module.linear_top_k(d.array(HIDDEN), d.array(WEIGHT), 9),
        r"k: expected at most 128, and at most V = 7, got 9",
    ),
    "too small a workspace": Refusal(
        linear(TARGET, workspace_bytes=3), r"workspace_bytes: expected an int of at least 4194304, got 3", ("numpy",)
    ),
    "no device": Refusal(
        lambda d: d.module.softmax(LOGITS, backend="npu"),
        r"cannot compute this call: no Ascend NPU found$",
        ("numpy",),
        ag.BackendUnavailableError,
    ),
}


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, each in SITUATIONS.items() for at in each.doors])
def test_situations(name: str, at: str):
    situation, here = SITUATIONS[name], door(at)
    if isinstance(situation, Value):
        np.testing.assert_allclose(situation.call(here), situation.right, rtol=1e-5)
        return
    with pytest.raises(situation.kind) as caught:
        situation.call(here)
    assert re.search(situation.words, str(caught.value)), caught.value
    assert not re.search(r"\b[135]6\d{4}\b|ACLNN", str(caught.value)), caught.value


@pytest.mark.parametrize("at", ["numpy", "torch"])
def test_one_hot_rows_with_probabilities_warn(at: str):
    """Rows of ids that are only 0 and 1, as many as classes, are ids, but may be meant as one-hot rows."""
    here, ids = door(at), np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    words = r"cross_entropy: target: looks one-hot \(all ids are 0 or 1, K = V\), .*; pass probabilities of all classes"
    for call, log_prob in (
        (cross_entropy(ids, LOGITS[:, :3], target_prob=here.array(PROB[:, :3])), LOGITS[:, :3]),
        (linear(ids, weight=WEIGHT[:3], target_prob=here.array(PROB[:, :3])), HIDDEN @ WEIGHT[:3].T),
    ):
        right = scipy.special.log_softmax(np.float64(log_prob), -1)
        right = -(PROB[:, :3] * np.take_along_axis(right, ids, -1)).sum(-1).mean()
        with pytest.warns(UserWarning, match=words) as caught:
            np.testing.assert_allclose(here.loss(call(here)), right, rtol=1e-5)
        assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cross_entropy(2 * ids, LOGITS[:, :3], target_prob=here.array(PROB[:, :3]))(here)
        cross_entropy(ids, LOGITS, target_prob=here.array(PROB[:, :3]))(here)


@pytest.mark.parametrize("zero", [np.float32(0), np.int64(0), np.array(0), np.array(-0.0)], ids=repr)
@pytest.mark.parametrize("at", DOORS)
def test_zeros_of_numpy_are_the_number_0(zero: Any, at: str):
    here, ids = door(at), INTEGERS[:, :2]
    result = here.module.cross_entropy(
        here.array(LOGITS[:2]), here.array(ids), target_prob=zero, reduction="none", outputs=("log_prob",)
    )
    np.testing.assert_allclose(here.numbers(result.log_prob), np.take_along_axis(LOG_PROB[:2], ids, -1), rtol=1e-5)
    assert not here.numbers(result.loss).any()


@pytest.mark.parametrize("number", [np.float32(1), np.array(1.0), False, np.bool_(False), np.zeros(1)], ids=repr)
def test_other_numbers_are_no_probabilities(number: Any):
    with pytest.raises(ag.ParamInvalidError, match="cross_entropy: target_prob: expected"):
        ag.cross_entropy(LOGITS[:2], INTEGERS, target_prob=number)


def test_losses_of_means_are_numbers():
    for function in (ag.cross_entropy, ag.linear_cross_entropy):
        arguments = (LOGITS, TARGET) if function is ag.cross_entropy else (HIDDEN, WEIGHT, TARGET)
        assert type(function(*arguments).loss) is np.float32
        assert type(function(*arguments, reduction="sum").loss) is np.float32
        assert function(*arguments, reduction="none").loss.shape == (4,)


def test_a_packed_mask_that_looks_unpacked_warns():
    mask, rows = np.zeros(16, np.uint8), np.zeros(16, np.float32)
    hidden, masked_target = np.ones((16, 3), np.float32), np.zeros(16, np.int64)

    def call(mask: np.ndarray) -> None:
        ag.fused_linear_cross_entropy_loss_grad(
            rows, hidden, WEIGHT, mask, masked_target, logits_max=rows, sum_exp_logits=rows + 1
        )

    with pytest.warns(UserWarning, match=r"target_mask: uint8 is read as packed bits.*astype\(bool\)") as caught:
        call(mask)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(mask[:2])
        call(mask.astype(bool))


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_a_mask_of_a_byte_for_each_row_warns(rows: int):
    numbers, hidden = np.zeros(rows, np.float32), np.ones((rows, 3), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ag.fused_linear_cross_entropy_loss_grad(
            *(numbers, hidden, WEIGHT, np.zeros(rows, np.uint8), np.zeros(rows, np.int64)),
            logits_max=numbers,
            sum_exp_logits=numbers + 1,
        )
    assert len(caught) == (rows > 1)
