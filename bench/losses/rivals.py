"""The two calls of a case of a linear layer, and the check of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..frameworks import TOLERANCES, Call
from ..linear.cases import WHOLE, LinearCase, arguments
from ..linear.rivals import agree
from .cases import ALL_OPTIONS, JAX, OUTPUTS, TOP_K, TOP_K_MODES, RelativeCase

#: Targets of a row in the case with several.
TARGETS = 8


class Pair(NamedTuple):
    """The call of a case, the other call, and the function that tells whether their results fit together."""

    own: Call
    other: Call
    agree: Callable[[Any, Any], bool]


def pair(case: RelativeCase) -> Pair:
    """Prepare both calls of a case, on the same arrays."""
    given = arguments(LinearCase(WHOLE, "loss and gradients", case.dtype, case.shape))
    prepare = {WHOLE: _with_option, TOP_K: _top_k, JAX: _compiled}[case.operator]
    return prepare(case, given)


def _with_option(case: RelativeCase, given: dict[str, Any]) -> Pair:
    changed = given | option(case.mode, case.shape)

    def agreeing(found: Sequence[Any], plain: Sequence[Any]) -> bool:
        if case.mode in OUTPUTS:
            return agree(found[:3], plain, case.dtype)
        # Other options compute another loss.
        return bool(
            np.isfinite(found[0]) and found[0] != plain[0] and all(np.isfinite(each).all() for each in found[1:3])
        )

    return Pair(partial(ag.linear_cross_entropy, **changed), partial(ag.linear_cross_entropy, **given), agreeing)


def option(mode: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Make the arguments of an option or an output of `linear_cross_entropy`."""
    if mode in OUTPUTS:
        return {"outputs": (mode,)}
    random = np.random.default_rng(1)
    rows, vocabulary, _ = shape
    scale_and_cap: dict[str, Any] = {"logit_scale": 0.5, "softcap": 30.0}
    smoothing: dict[str, Any] = {"label_smoothing": 0.1}
    z_loss: dict[str, Any] = {"lse_square_scale": 1e-4}
    if mode == ALL_OPTIONS:
        return scale_and_cap | smoothing | z_loss | {"outputs": ("entropy",)}
    if mode == "8 targets":
        first = random.integers(0, vocabulary, (rows, 1))
        target = (first + np.arange(TARGETS) * (vocabulary // TARGETS)) % vocabulary
        return {"target": target, "target_prob": random.dirichlet(np.ones(TARGETS), rows).astype(np.float32)}
    return {
        "bias": {"bias": random.standard_normal(vocabulary, np.float32)},
        "scale and cap": scale_and_cap,
        "smoothing": smoothing,
        "z-loss": z_loss,
        "temperatures": {"temperature": random.uniform(0.5, 2, rows).astype(np.float32)},
        "class weights": {"class_weight": random.uniform(0.5, 1.5, vocabulary).astype(np.float32)},
    }[mode]


def _top_k(case: RelativeCase, given: dict[str, Any]) -> Pair:
    x, weight, target = (given[name] for name in ("input", "weight", "target"))

    def agreeing(found: Any, statistics: Any) -> bool:
        # The largest log-probability is the maximum minus the lse.
        largest = -np.log(statistics.sum_exp_logits)
        return np.allclose(found.log_prob[:, 0], largest, rtol=TOLERANCES["float32"], atol=TOLERANCES["float32"])

    return Pair(
        partial(ag.linear_top_k, x, weight, TOP_K_MODES[case.mode]),
        partial(ag.fused_linear_online_max_sum, x, weight, target, 0, len(weight)),
        agreeing,
    )


def _compiled(case: RelativeCase, given: dict[str, Any]) -> Pair:
    """Prepare the loss with both gradients in a program that JAX has compiled, and the call of arrays."""
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
    return Pair(
        compiled,
        partial(ag.linear_cross_entropy, **given),
        lambda found, expected: agree(found, expected, case.dtype),
    )
