"""Functions for JAX on the CPU: row-wise operators, losses, and the largest log-probabilities of a linear layer.

JAX can trace them, in ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

>>> import jax, jax.numpy as jnp
>>> import ascend_grad.jax as agj
>>> gradient = jax.jit(jax.grad(lambda x: agj.softmax(x)[0]))
>>> gradient(jnp.zeros(4))
Array([ 0.1875, -0.0625, -0.0625, -0.0625], dtype=float32)
"""

try:
    import jax
except ImportError as error:
    raise ImportError(f"ascend_grad.jax needs JAX (pip install jax): {error}", name="jax") from error

if not hasattr(jax, "enable_x64"):  # older JAX would round results of float64
    raise ImportError(f"ascend_grad.jax needs JAX 0.8 or newer, found {jax.__version__}")

from .. import _xla_frame, _xla_losses  # type: ignore[attr-defined]  # noqa: F401  (see ascend_grad._compiled)
from .cross_entropy import cross_entropy
from .linear import linear_cross_entropy
from .rowwise import log_softmax, scaled_masked_softmax, softmax
from .top_k import linear_top_k

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_top_k",
    "log_softmax",
    "scaled_masked_softmax",
    "softmax",
]
