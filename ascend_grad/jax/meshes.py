"""Calls of compiled functions on meshes of devices: in `jax.shard_map`, and with sharding in the types of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_HAS_MANUAL_AXIS_TYPE = hasattr(jax.sharding, "ManualAxisType")  # JAX 0.10 or newer
_HAS_PCAST = hasattr(jax.lax, "pcast")  # JAX 0.8.1 or newer

# ---- axes of `jax.shard_map` -----------------------------------------------------------------------------------------


def _varying_axes(arrays: Iterable[jax.Array]) -> frozenset:
    """Return the axes along which any of the arrays differs between devices."""
    types = map(jax.typeof, arrays)
    return frozenset().union(*(each.manual_axis_type.varying if _HAS_MANUAL_AXIS_TYPE else each.vma for each in types))


def _varying(array: jax.Array, axes: frozenset) -> jax.Array:
    """Return the array as one that differs along all of these axes."""
    missing = tuple(sorted(axes - _varying_axes([array]), key=str))  # in an order that all processes have
    if not missing:
        return array
    return jax.lax.pcast(array, missing, to="varying") if _HAS_PCAST else jax.lax.pvary(array, missing)


# ---- explicit axes ---------------------------------------------------------------------------------------------------


def _resharded(array: jax.Array, like: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Return an array whose dimensions are sharded as these dimensions of another one, and the others replicated."""
    sharding = jax.typeof(like).sharding
    if all(axes is None for axes in sharding.spec):  # also if no axis of the mesh is explicit
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in dims))))


def _replicated(array: jax.Array) -> jax.Array:
    return _resharded(array, array, ())


def sharded_as(result: jax.Array, array: jax.Array, without: int | None = None) -> jax.Array:
    """Return a result with the sharding of an array, or of the array's other dimensions if one is reduced."""
    reduced = () if without is None else (without % array.ndim,)
    return _resharded(result, array, [i for i in range(array.ndim) if i not in reduced])


def aligned(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return arrays that vary along the same axes of `jax.shard_map`, and are replicated along explicit axes.

    Both conversions are JAX's own, and their transposes give a gradient the type of its array. The gradient of an array
    that all devices share becomes the sum over the devices.
    """
    axes = _varying_axes(arrays.values())
    return {name: _replicated(_varying(each, axes)) for name, each in arrays.items()}


def compiled_in_manual_mesh(function: Callable) -> Callable:
    """Return a function of settings and arrays that is compiled within `jax.shard_map`.

    JAX evaluates a `jax.custom_vjp` with symbolic zeros there only if it is part of a compiled program.
    """
    compiled = jax.jit(function, static_argnums=0)

    def call(settings: Any, *arrays: Any) -> Any:
        is_manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        return (compiled if is_manual else function)(settings, *arrays)

    return call


# ---- calls -----------------------------------------------------------------------------------------------------------


def compiled_call(
    target: str,
    specs: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    attributes: Mapping[str, Any],
    *,
    takes_batches: bool,
) -> list[jax.Array]:
    """Call a compiled function, whose results vary along all axes of `jax.shard_map` along which an array varies.

    `jax.vmap` adds a dimension in front if the function takes batches. Otherwise it solves one problem after another.
    """

    def call_once(*arrays: jax.Array) -> list[jax.Array]:
        types = [_typed(each, arrays) for each in specs]
        vmap_method = "expand_dims" if takes_batches else "sequential"
        return jax.ffi.ffi_call(target, types, vmap_method=vmap_method)(*arrays, **attributes)

    if all(kind == AxisType.Auto for each in arrays for kind in jax.typeof(each).sharding.mesh.axis_types):
        return call_once(*arrays)

    # If a batch is sharded over an axis that types name, JAX's own rules fail, or lose the sharding of the results.
    call = jax.custom_batching.custom_vmap(call_once)

    @call.def_vmap
    def _(size: int, is_batched: Sequence[bool], *arrays: jax.Array) -> tuple[list, list]:
        first = next(each for each, flag in zip(arrays, is_batched) if flag)
        replicated = [_replicated(each) for each in arrays]
        if takes_batches:
            wider = [jax.ShapeDtypeStruct((size, *each.shape), each.dtype) for each in specs]
            whole = [each if flag else jnp.expand_dims(each, 0) for each, flag in zip(replicated, is_batched)]
            found = compiled_call(target, wider, whole, attributes, takes_batches=True)
        else:

            def one(problem: Sequence[jax.Array]) -> list[jax.Array]:
                own = iter(problem)
                return call(*(next(own) if flag else each for each, flag in zip(replicated, is_batched)))

            found = jax.lax.map(one, [each for each, flag in zip(replicated, is_batched) if flag])
        return [_resharded(each, first, (0,)) for each in found], [True] * len(found)

    return call(*arrays)


def _typed(spec: jax.ShapeDtypeStruct, arrays: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
    """Return the type of a result of these arrays. JAX would take it as equal on all devices."""
    axes = _varying_axes(arrays)
    if not axes:
        return spec
    varying = (
        {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if _HAS_MANUAL_AXIS_TYPE else {"vma": axes}
    )
    mesh = next(jax.typeof(each).sharding.mesh for each in arrays if _varying_axes([each]))
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, PartitionSpec()), **varying)
