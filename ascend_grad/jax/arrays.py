"""Arguments of JAX's functions: arrays, traced or not, and settings, which are not traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments import check_class, shown
from ..arrays import native
from ..errors import ParamTypeError
from ..inspection import bound_call
from ..operators.signatures import Words

_ERRORS = """
AscendGradError
    As the function of `ascend_grad` for shapes, dtypes and numbers, or an argument that is no array is traced.
"""
WORDS = Words("jax.Array", errors=_ERRORS, module="agj")


def as_array(value: object, name: str, operator: str) -> jax.Array | None:
    """Return an argument as a JAX array, traced or not. None stays None, which the checks refuse or accept."""
    if value is None:
        return None
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        expected = "an array of jax or NumPy, or a number"
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}", operator=operator)
    if isinstance(value, np.ndarray):
        check_class(type(value), name, operator)
        value = value.astype(native(value.dtype), copy=False)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:  # a dtype that JAX does not have
        message = f"{name}: expected an array that JAX supports, got {shown(value)}: {error}"
        raise ParamTypeError(message, operator=operator) from error


def as_floating(arrays: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert integers and truth values under these names to the floating dtype of the others, or to JAX's default."""
    given = [name for name in names if arrays.get(name) is not None]
    whole = [name for name in given if _is_whole(arrays[name])]
    others = [arrays[name].dtype for name in given if name not in whole]
    dtype = others[0] if others else jnp.result_type(float)
    return {**arrays, **{name: arrays[name].astype(dtype) for name in whole}}


def _is_whole(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_


def as_classes(target: Any) -> Any:
    """Convert targets of any integer dtype to one that compiled functions take. Those that are too large stay so."""
    if target is None or not jnp.issubdtype(target.dtype, jnp.integer) or target.dtype in (np.int32, np.int64):
        return target
    dtype = jnp.result_type(int)
    if target.dtype.itemsize >= dtype.itemsize:
        target = jnp.minimum(target, jnp.iinfo(dtype).max)
    return target.astype(dtype)


def _placeholder(array: jax.Array, value: int) -> np.ndarray:
    """Return an array of the same shape and dtype, with one value, in no memory."""
    # Random keys have a dtype that NumPy lacks.
    dtype: Any = array.dtype if isinstance(array.dtype, np.dtype) else np.dtype(object)
    fits = dtype.kind not in "iu" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    return np.broadcast_to(np.array(value if fits else 0).astype(dtype), array.shape)


def check(operator: str, arrays: dict[str, jax.Array | None], **settings: object) -> tuple[dict[str, Any], int]:
    """Refuse arguments that the contract refuses: by shapes, dtypes and settings, which are known when JAX traces.

    Return all arguments by name, converted, and the number of threads, 0 for the default. Their arrays are
    placeholders, as elements are not known. Placeholders have elements that every operator takes: 1, and for targets
    `ignore_index`.
    """
    for name, value in settings.items():
        if isinstance(value, jax.core.Tracer):
            got = "a tracer; name the argument in static_argnames of jax.jit"
            raise ParamTypeError(f"{name}: expected a value known when JAX traces, got {got}", operator=operator)
    ignored = settings.get("ignore_index")
    element = {"target": int(ignored) if isinstance(ignored, (int, np.integer)) else 0}
    placeholders = {
        name: None if each is None else _placeholder(each, element.get(name, 1)) for name, each in arrays.items()
    }
    call, num_threads, _ = bound_call(operator, (), {**placeholders, **settings, "backend": "cpu"})
    return call.arguments, num_threads
