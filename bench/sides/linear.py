"""The linear operators as each side computes them: this library, NumPy's formula, PyTorch with all logits or in chunks.

A side is a function of a case, its arguments and its results' arrays. It returns a call without arguments, or None if
it does not take part in the case. The call returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu

from .. import frameworks
from ..arrays import TARGETS
from ..case import FILTERED, GRADIENT, JAX, MAX_SUM, WEIGHT_GRADIENT, WHOLE, Case, compute_dtype
from ..cases import ALL_OPTIONS, OUTPUTS, SMALL_SHAPES, TOP_K_MODES
from ..frameworks import TOLERANCES, Call
from ..results import CHAIN, OWN, SKLEARN, UNFILTERED

Outs = tuple[np.ndarray, np.ndarray]
Sides = dict[str, Callable[[Case, dict[str, Any], Outs], Call | None]]

#: Filter for the trained model: tiles whose softmax entries are all at most this are skipped. It is less than the
#: rounding of bfloat16 near 1.
FILTER_EPS = 2.0**-12
#: Floating-point operations that take PyTorch's slowest products a fraction of a second.
FEW_OPERATIONS = 2**28


def square_product(case: Case, size: int) -> Call:
    """Prepare a product of square matrices in BLAS, in the type of the accumulators."""
    a, b, out = np.random.default_rng(0).standard_normal((3, size, size)).astype(compute_dtype(case.dtype))
    return partial(np.matmul, a, b, out=out)


# ---- this library ----------------------------------------------------------------------------------------------------


def ascend_grad(case: Case, given: dict[str, Any], outs: Outs, filter_eps: float = FILTER_EPS) -> Call:
    if case.mode == WEIGHT_GRADIENT:
        call: Call = lambda: ag.linear_cross_entropy(**given, output_mask=(False, True))[::2]  # noqa: E731
    elif case.operator == WHOLE:
        call = partial(ag.linear_cross_entropy, **given)
    elif case.operator == MAX_SUM:
        call = lambda: ag.fused_linear_online_max_sum(**given)[:3]  # noqa: E731
    else:
        filter_eps = filter_eps if case.mode == FILTERED else 0.0
        call = partial(ag.fused_linear_cross_entropy_loss_grad, **given, filter_eps=filter_eps, out=outs)
    if not case.variant:
        return call

    def with_variant() -> Any:
        before = _cpu.variant()
        _cpu.force_variant(case.variant)
        try:
            return call()
        finally:
            _cpu.force_variant(before)

    return with_variant


def unfiltered(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    return ascend_grad(case, given, outs, 0.0) if case.mode == FILTERED else None


def direct(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare a direct call of the backend in the smallest problem, as the time of dispatch is the same at any size."""
    if case.operator != GRADIENT or case.shape != SMALL_SHAPES[-1]:
        return None
    return frameworks.backend_alone(case.operator, **given, out=outs)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def numpy_formula(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare NumPy's formula with all logits in memory. 16-bit arrays are converted to float32."""
    if case.variant or case.mode == FILTERED:
        return None
    wide = compute_dtype(case.dtype)
    rows = np.arange(len(given["input"]))

    def call() -> Sequence[Any]:
        x, weight = given["input"].astype(wide, copy=False), given["weight"].astype(wide, copy=False)
        if case.operator == GRADIENT:
            target, grad = given["masked_target"], given["grad"]
            if case.mode == "stored":
                p = given["softmax"].copy()
            else:
                p = x @ weight.T
                p -= given["logits_max"][:, None]
                np.exp(p, out=p)
                p /= given["sum_exp_logits"][:, None]
        else:
            target, grad = given["target"], wide.type(1 / len(x))
            p = x @ weight.T
            logits_max = p.max(axis=1)
            p -= logits_max[:, None]
            predicted = p[rows, target]
            np.exp(p, out=p)
            total = p.sum(axis=1)
            if case.operator == MAX_SUM:
                return logits_max, total, predicted
            p /= total[:, None]
        p[rows, target] -= 1
        p *= grad if np.ndim(grad) == 0 else grad[:, None]
        if case.mode == WEIGHT_GRADIENT:
            return np.mean(np.log(total) - predicted, dtype=wide), p.T @ x
        if case.operator == WHOLE:
            loss = np.mean(np.log(total) - predicted, dtype=wide)
            return loss, *(value.astype(outs[0].dtype, copy=False) for value in (p @ weight, p.T @ x))
        if outs[0].dtype == wide:
            return np.matmul(p, weight, out=outs[0]), np.matmul(p.T, x, out=outs[1])
        for out, value in zip(outs, (p @ weight, p.T @ x)):
            out[...] = value
        return outs

    return call


def chain(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare NumPy's products with this library's loss of logits between them."""
    if case.mode != WEIGHT_GRADIENT:
        return None
    x, weight, target = (given[name] for name in ("input", "weight", "target"))

    def call() -> Sequence[Any]:
        loss, gradient = ag.cross_entropy(x @ weight.T, target)
        return loss, gradient.T @ x

    return call


def scikit_learn(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare the loss with which scikit-learn fits a multinomial regression."""
    return (
        sklearn_loss(*(given[name] for name in ("input", "weight", "target"))) if case.mode == WEIGHT_GRADIENT else None
    )


def sklearn_loss(x: Any, weight: np.ndarray, target: np.ndarray) -> Call | None:
    """Prepare scikit-learn's loss and weight gradient, of a dense or a sparse input, if the package is installed."""
    losses, loss = (frameworks.module(name) for name in ("sklearn.linear_model._linear_loss", "sklearn._loss.loss"))
    if losses is None or loss is None:
        return None
    model = losses.LinearModelLoss(loss.HalfMultinomialLoss(n_classes=len(weight)), fit_intercept=False)
    threads, coefficients = ag.get_num_threads(), np.asfortranarray(weight)
    y = target.astype(weight.dtype)

    def call() -> Sequence[Any]:
        found, gradient = model.loss_gradient(coefficients, x, y, n_threads=threads)
        return weight.dtype.type(found), gradient

    return call


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _torch_for(case: Case) -> Any | None:
    """Return PyTorch if it is compared with the case's variant: with any in bfloat16, otherwise with the default."""
    return frameworks.module("torch") if not case.variant or case.dtype == "bfloat16" else None


def torch_formula(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare PyTorch's formula with all logits in memory; for the whole loss, its own function and ``backward()``."""
    torch = _torch_for(case)
    # PyTorch's float16 products reach a few GFLOP/s, so that one call of a large case takes minutes.
    is_slow = case.dtype == "float16" and case.operations > FEW_OPERATIONS
    if torch is None or is_slow or case.mode == FILTERED:
        return None
    if case.operator == WHOLE:
        return _torch_whole(given, None, case.mode)
    tensors = {
        name: frameworks.tensor(value) if isinstance(value, np.ndarray) else value for name, value in given.items()
    }
    x, weight = tensors["input"], tensors["weight"]
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    rows = torch.arange(len(x))
    if case.operator == MAX_SUM:

        def statistics() -> Sequence[Any]:
            logits = (x @ weight.T).to(wide)
            logits_max = logits.amax(dim=1)
            logits -= logits_max[:, None]
            predicted = logits[rows, tensors["target"]]
            return logits_max, logits.exp_().sum(dim=1), predicted

        return statistics
    target, grad = tensors["masked_target"], tensors["grad"]
    results = tuple(frameworks.tensor(out) for out in outs)

    def gradients() -> Sequence[Any]:
        if case.mode == "stored":
            p = tensors["softmax"].clone()
        else:
            p = (x @ weight.T).to(wide).sub_(tensors["logits_max"][:, None]).exp_()
            p /= tensors["sum_exp_logits"][:, None]
        p[rows, target] -= 1
        p *= grad[:, None]
        p = p.to(x.dtype)
        return torch.mm(p, weight, out=results[0]), torch.mm(p.T, x, out=results[1])

    return gradients


def torch_chunked(case: Case, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare PyTorch's own loss in chunks, without all logits in memory, if this version of PyTorch has it."""
    torch = _torch_for(case)
    if torch is None or case.operator != WHOLE or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return _torch_whole(given, torch.nn.LinearCrossEntropyOptions(), case.mode)


def _torch_whole(given: dict[str, Any], options: Any, mode: str) -> Call | None:
    torch = frameworks.module("torch")
    assert torch is not None
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    return None if function is None else _by_autograd(partial(function, options=options), given, mode)


def _by_autograd(function: Callable[..., Any], given: dict[str, Any], mode: str) -> Call:
    """Prepare a call of a loss on tensors, and of its ``backward()``."""
    torch = frameworks.module("torch")
    assert torch is not None

    def call() -> Sequence[Any]:
        with torch.inference_mode(False), torch.enable_grad():
            x, weight, target = (frameworks.tensor(given[name]) for name in ("input", "weight", "target"))
            inputs = (weight,) if mode == WEIGHT_GRADIENT else (x, weight)
            for each in inputs:
                each.requires_grad_()
            loss = function(x, weight, target)
            loss.backward()
        return loss.detach(), *(each.grad for each in inputs)

    return call


SIDES: Sides = {
    OWN: ascend_grad,
    UNFILTERED: unfiltered,
    "numpy": numpy_formula,
    CHAIN: chain,
    SKLEARN[0]: scikit_learn,
    "torch": torch_formula,
    "torch chunked": torch_chunked,
}


def ascend_grad_on_tensors(case: Case, given: dict[str, Any], outs: Outs) -> Call:
    import ascend_grad.torch as agt

    return _by_autograd(agt.linear_cross_entropy, given, case.mode)


#: The sides of a loss on tensors.
TENSOR_SIDES: Sides = {OWN: ascend_grad_on_tensors, "torch": torch_formula, "torch chunked": torch_chunked}


# ---- calls that are compared with another call of this library -------------------------------------------------------


def pair(case: Case, given: dict[str, Any]) -> dict[str, Call]:
    """Prepare the call of a case without rivals, and the other call, on the same arrays."""
    x, weight, target = (given[name] for name in ("input", "weight", "target"))
    plain = partial(ag.linear_cross_entropy, **given)
    if case.operator == WHOLE:
        return {OWN: partial(ag.linear_cross_entropy, **given | option(case.mode, case.shape)), case.other: plain}
    if case.operator == JAX:
        return {OWN: _compiled(given), case.other: plain}
    return {
        OWN: partial(ag.linear_top_k, x, weight, TOP_K_MODES[case.mode]),
        case.other: partial(ag.fused_linear_online_max_sum, x, weight, target, 0, len(weight)),
    }


def option(mode: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Make the arguments of an option or an output of `linear_cross_entropy`."""
    if mode in OUTPUTS:
        return {"outputs": (mode,)}
    random = np.random.default_rng(1)
    rows, vocabulary, _ = shape
    options: dict[str, dict[str, Any]] = {
        "scale and cap": {"logit_scale": 0.5, "softcap": 30.0},
        "smoothing": {"label_smoothing": 0.1},
        "z-loss": {"lse_square_scale": 1e-4},
    }
    if mode == ALL_OPTIONS:
        return {"outputs": ("entropy",)} | {name: value for each in options.values() for name, value in each.items()}
    if mode == "8 targets":
        first = random.integers(0, vocabulary, (rows, 1))
        target = (first + np.arange(TARGETS) * (vocabulary // TARGETS)) % vocabulary
        return {"target": target, "target_prob": random.dirichlet(np.ones(TARGETS), rows).astype(np.float32)}
    if mode == "bias":
        return {"bias": random.standard_normal(vocabulary, np.float32)}
    if mode == "temperatures":
        return {"temperature": random.uniform(0.5, 2, rows).astype(np.float32)}
    if mode == "class weights":
        return {"class_weight": random.uniform(0.5, 1.5, vocabulary).astype(np.float32)}
    return options[mode]


def _compiled(given: dict[str, Any]) -> Call:
    """Prepare the loss with both gradients in a program that JAX has compiled."""
    jax = frameworks.module("jax")
    assert jax is not None
    import ascend_grad.jax as agj

    program = jax.jit(jax.value_and_grad(agj.linear_cross_entropy, argnums=(0, 1)))
    arrays = [jax.device_put(given[name]) for name in ("input", "weight", "target")]

    def compiled() -> Any:
        loss, gradients = jax.block_until_ready(program(*arrays))
        return loss, *gradients

    # The first call compiles the program.
    compiled()
    return compiled


# ---- agreement -------------------------------------------------------------------------------------------------------


def agree(
    got: Sequence[np.ndarray], expected: Sequence[np.ndarray], dtype: str, terms: Sequence[float] = (0.0, 0.0, 0.0)
) -> bool:
    """Return whether two sides' results are equal up to rounding, or up to the smallest subnormal number.

    ``terms`` is as in `frameworks.agree`, for each result.
    """
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    wide = compute_dtype(dtype)
    # A side that rounds logits to 16 bits changes probabilities by a few units in the last place.
    tolerance = {"bfloat16": 2.0**-4, "float16": 2.0**-7}.get(dtype, TOLERANCES[dtype])
    pairs = [(a.astype(wide), b.astype(wide)) for a, b in zip(got, expected)]
    return len(got) == len(expected) and all(
        a.shape == b.shape
        and bool(np.all(np.abs(a - b) <= tolerance * (np.abs(b) + np.abs(b).max(initial=term)) + smallest))
        for (a, b), term in zip(pairs, terms)
    )


def calls_agree(case: Case, own: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether the results of a case without rivals agree with the results of its other call."""
    if case.operator == JAX or case.mode in OUTPUTS:
        return agree(own[:3], other[:3], case.dtype)
    if case.operator == WHOLE:
        # Other options compute another loss.
        return bool(np.isfinite(own[0]) and own[0] != other[0] and all(np.isfinite(each).all() for each in own[1:3]))
    # The largest log-probability is the maximum minus the lse.
    (log_prob, _), (_, total, *_) = own, other
    return np.allclose(log_prob[:, 0], -np.log(total), rtol=TOLERANCES["float32"], atol=TOLERANCES["float32"])
