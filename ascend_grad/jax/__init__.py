"""Functions for JAX on the CPU: row-wise operators, losses, and the largest log-probabilities of a linear layer.

JAX can trace them, in ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

>>> import jax, jax.numpy as jnp
>>> import ascend_grad.jax as agj
>>> logits, target = jnp.zeros((2, 4)), jnp.array([0, 3])
>>> loss, grad = jax.jit(jax.value_and_grad(agj.cross_entropy))(logits, target)
>>> grad[0]
Array([-0.375,  0.125,  0.125,  0.125], dtype=float32)
"""

try:
    import jax
except ImportError as error:
    raise ImportError(f"ascend_grad.jax needs JAX (pip install jax): {error}", name="jax") from error

if not hasattr(jax, "enable_x64"):  # older JAX would round results of float64
    raise ImportError(f"ascend_grad.jax needs JAX 0.8 or newer, found {jax.__version__}")

from .. import _xla_frame, _xla_losses  # type: ignore[attr-defined]  # noqa: F401  (see ascend_grad._compiled)
from . import rowwise
from .cross_entropy import cross_entropy
from .linear import linear_cross_entropy
from .rowwise import *
from .top_k import linear_top_k

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_top_k",
]
__all__ += rowwise.__all__
