"""Compare the row-wise operators of `ascend_grad.jax` with the formulas in float64, and check its documentation."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, assert_identical, generator, random_problem
from xla_frames import called_by_xla

import ascend_grad as ag
import ascend_grad.jax as agj
from ascend_grad import _memory

SOURCES = Path(__file__).resolve().parents[2]
SOFTMAXES = ("softmax", "log_softmax")
#: Errors that are allowed, relative to the largest value. Results of 16 bits have been rounded once or twice.
TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-13}


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    exponentials = np.exp(x - np.max(x, axis, keepdims=True, initial=-np.inf))
    return exponentials / np.sum(exponentials, axis, keepdims=True)


def softmax_backward(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    return (g - np.sum(g * y, axis, keepdims=True)) * y


def normal(shape, dtype, *key) -> np.ndarray:
    return generator(shape, str(dtype), *key).standard_normal(shape).astype(dtype)


def assert_close(got, right, dtype: str) -> None:
    right = np.asarray(right, np.float64)
    assert got.shape == right.shape
    largest = max(np.max(np.abs(right), initial=0), 1)
    np.testing.assert_allclose(np.asarray(got, np.float64), right, rtol=0, atol=TOLERANCES[dtype] * largest)


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOFTMAXES)
@settings(max_examples=15)  # JAX compiles a program for each example
@given(data=st.data())
def test_values_and_gradients(name, dtype, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=5)))
    axis = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    x, g = normal(shape, DTYPES[dtype], "x"), normal(shape, DTYPES[dtype], "g")
    function = data.draw(st.sampled_from((lambda f: f, jax.jit)))
    value, backward = jax.vjp(function(lambda x: getattr(agj, name)(x, axis)), jnp.asarray(x))
    (grad,) = backward(jnp.asarray(g))
    # The functions for JAX and for NumPy arrays have the same kernels, whose errors have separate tests.
    assert_identical(np.asarray(value), getattr(ag, name)(x, axis))
    assert_identical(np.asarray(grad), getattr(ag, f"{name}_backward")(g, np.asarray(value), axis))
    if x.ndim:
        x, g = np.float64(x), np.float64(g)
        y = softmax(x, axis)
        assert_close(value, y if name == "softmax" else np.log(y), dtype)
        right = softmax_backward(g, y, axis) if name == "softmax" else g - np.sum(g, axis, keepdims=True) * y
        assert_close(grad, right, dtype)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (1, 1, 4, 5)], ids=str)
def test_masked_values_and_gradients(mask_shape, dtype, transform):
    x, g = normal((2, 3, 4, 5), DTYPES[dtype], "x"), normal((2, 3, 4, 5), DTYPES[dtype], "g")
    mask = generator(mask_shape).random(mask_shape) < 0.4
    mask[..., 0, :] = True
    value, backward = jax.vjp(
        transform(lambda x: agj.scaled_masked_softmax(x, jnp.asarray(mask), 0.37)), jnp.asarray(x)
    )
    (grad,) = backward(jnp.asarray(g))
    assert_identical(np.asarray(value), ag.scaled_masked_softmax(x, mask, 0.37))
    assert_identical(np.asarray(grad), ag.scaled_masked_softmax_backward(g, np.asarray(value), mask, 0.37))
    y = softmax(np.where(mask, -10000.0, 0.37 * np.float64(x)), -1)
    assert_close(value, y, dtype)
    assert_close(grad, np.where(mask, 0, 0.37 * softmax_backward(np.float64(g), y, -1)), dtype)


def assert_right_gradients(function, x: jax.Array) -> None:
    """Compare the first and second derivatives with differences of values."""
    jax.test_util.check_grads(jax.jit(function), (x,), order=2, modes=["rev"])


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((5,), -1), ((3, 4), 0), ((2, 3, 4), 1)], ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_gradients_of_gradients(name, shape, axis):
    assert_right_gradients(lambda x: getattr(agj, name)(x, axis), jnp.asarray(normal(shape, np.float64)))


@pytest.mark.parametrize("scale", [1.0, -0.7, 0.0])
def test_gradients_of_gradients_of_masked(scale):
    mask = jnp.asarray(generator("mask").random((1, 2, 3, 4)) < 0.4).at[..., 0, :].set(True)
    x = jnp.asarray(normal((2, 2, 3, 4), np.float64))
    assert_right_gradients(lambda x: agj.scaled_masked_softmax(x, mask, scale), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_gradients_with_a_scale_that_16_bits_do_not_hold(dtype):
    """The second derivative with respect to the upstream gradient is right for a scale beyond the range of 16 bits."""
    shape, scale = (1, 1, 2, 5), 1e5
    mask = jnp.zeros(shape, bool)
    g, v = (1e-4 * normal(shape, np.float64, name) for name in ("g", "v"))

    def again(dtype):
        gradient = jax.vjp(lambda x: agj.scaled_masked_softmax(x, mask, scale), jnp.zeros(shape, dtype))[1]
        return jax.vjp(lambda g: gradient(g)[0], jnp.asarray(g, dtype))[1](jnp.asarray(v, dtype))[0]

    assert_close(again(DTYPES[dtype]), again(np.float64), dtype)


def test_forward_mode_is_an_error():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(agj.softmax, (jnp.zeros(3),), (jnp.ones(3),))


def test_long_rows_on_several_threads():
    """Long rows, which several threads split and which need a workspace, have the bits of NumPy's arrays."""
    x = normal((2, (5 << 20) + 3), np.float32)
    assert_identical(np.asarray(jax.jit(agj.log_softmax)(jnp.asarray(x))), ag.log_softmax(x))


def test_strided_dimensions_of_every_operator(dtype):
    problem = random_problem("softmax", (7, 130, 5), DTYPES[dtype], 1)
    (x,) = problem.arrays
    assert_identical(np.asarray(agj.softmax(jnp.asarray(x), 1)), ag.softmax(x, 1))


def test_scales():
    x, mask = jnp.asarray(normal((1, 1, 3, 4), np.float32)), jnp.zeros((1, 1, 3, 4), bool)
    for scale in (0.1, -2, jnp.float32(0.1), float("nan"), float("inf")):
        right = ag.scaled_masked_softmax(np.asarray(x), np.asarray(mask), float(scale))
        assert_identical(np.asarray(agj.scaled_masked_softmax(x, mask, scale)), right)


def test_arguments_that_are_no_arrays_of_jax():
    x = normal((2, 3), np.float32)
    assert_identical(np.asarray(agj.softmax(x)), ag.softmax(x))
    assert agj.softmax(1.5) == 1
    assert agj.softmax(np.float32(1.5)).dtype == np.float32
    assert_identical(np.asarray(agj.softmax(x.astype(">f4"))), ag.softmax(x))


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOFTMAXES)
@settings(max_examples=15)  # JAX compiles a program for each example
@given(data=st.data())
def test_batches(name, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    batch = data.draw(st.integers(0, len(shape) - 1))
    rank = max(len(shape) - 1, 1)
    axis = data.draw(st.integers(-rank, rank - 1))
    x = normal(shape, np.float32)
    if shape[batch] == 0:
        return  # JAX refuses an empty batch
    result = jax.vmap(lambda x: getattr(agj, name)(x, axis), in_axes=batch, out_axes=batch)(jnp.asarray(x))
    rows = [getattr(ag, name)(row, axis) for row in np.moveaxis(x, batch, 0)]
    assert_identical(np.asarray(result), np.moveaxis(np.stack(rows), 0, batch))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_batches_of_gradients(transform):
    """Batches of upstream gradients, of values, and of both give the same gradients as single calls."""
    x, g = normal((6, 3, 5), np.float32, "x"), normal((6, 3, 5), np.float32, "g")

    def pull(x, g):
        return jax.vjp(lambda x: agj.softmax(x, 0), x)[1](g)[0]

    for in_axes in ((None, 0), (0, None), (0, 0)):
        given = x[0] if in_axes[0] is None else x, g[0] if in_axes[1] is None else g
        result = transform(jax.vmap(pull, in_axes))(*map(jnp.asarray, given))
        for i in range(6):
            one, upstream = (each if axis is None else each[i] for each, axis in zip(given, in_axes))
            assert_identical(np.asarray(result[i]), ag.softmax_backward(upstream, ag.softmax(one, 0), 0))


@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 1, 4, 5), (1, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (2, 4)], ids=str)
def test_batches_of_masked(mask_shape, axes):
    x, g = normal((2, 3, 4, 5), np.float32, "x"), normal((2, 3, 4, 5), np.float32, "g")
    mask = generator("mask").random((6, *mask_shape)) < 0.4
    many = normal((6, 2, 3, 4, 5), np.float32, "many")
    given = x if axes[0] is None else np.moveaxis(many, 0, axes[0]), mask[0]
    if axes[1] is not None:
        given = given[0], np.moveaxis(mask, 0, axes[1])

    def pull(x, mask):
        value, backward = jax.vjp(lambda x: agj.scaled_masked_softmax(x, mask, 0.5), x)
        return value, backward(jnp.asarray(g))[0]

    values, grads = jax.jit(jax.vmap(pull, axes))(*map(jnp.asarray, given))
    for i in range(6):
        one, hidden = x if axes[0] is None else many[i], mask[0] if axes[1] is None else mask[i]
        right = ag.scaled_masked_softmax(one, hidden, 0.5)
        assert_identical(np.asarray(values[i]), right)
        assert_identical(np.asarray(grads[i]), ag.scaled_masked_softmax_backward(g, right, hidden, 0.5))


def test_batches_of_batches():
    x = normal((2, 3, 4, 5), np.float32)
    result = jax.vmap(jax.vmap(jax.vmap(jax.vmap(agj.softmax))))(jnp.asarray(x))
    assert np.all(result == 1)  # a single element has the softmax 1
    result = jax.vmap(jax.vmap(lambda x: agj.softmax(x, 0), 1, 1), 2, 2)(jnp.asarray(x))
    assert_identical(np.asarray(result), ag.softmax(x, 0))


def test_more_dimensions_than_there_may_be():
    x = jnp.zeros((1,) * 9)
    error = outcome(agj.softmax, x)
    assert type(error) is INVALID
    assert "input: expected rank 0 to 8, got rank 9" in str(error)
    with pytest.raises(jax.errors.JaxRuntimeError, match="more than 8 dimensions, counting the dimensions of vmap"):
        jax.vmap(agj.softmax)(x)


def test_within_loops_and_checkpoints():
    x = jnp.asarray(normal((4, 8), np.float32))
    (scanned, _) = jax.lax.scan(lambda carry, _: (agj.softmax(carry), None), x, length=3)
    assert_identical(np.asarray(scanned), ag.softmax(ag.softmax(ag.softmax(np.asarray(x)))))
    plain = jax.grad(lambda x: (agj.softmax(x) ** 2).sum())(x)
    again = jax.grad(jax.checkpoint(lambda x: (agj.softmax(x) ** 2).sum()))(x)
    assert_identical(np.asarray(again), np.asarray(plain))


def test_shapes_alone():
    result = jax.eval_shape(agj.softmax, jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))
    assert (result.shape, result.dtype) == ((2, 3), jnp.bfloat16)


def test_several_threads():
    x = normal((300, 700), np.float32)
    function, right = jax.jit(agj.softmax), ag.softmax(x)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.asarray(function(jnp.asarray(x))), range(40)):
            assert_identical(result, right)


def test_sharded_arrays(run_script):
    """Results of sharded arrays are right, however XLA gathers the rows."""
    script = """
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    import ascend_grad as ag, ascend_grad.jax as agj
    mesh = jax.make_mesh((2,), ("rows",))
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)
    for spec in (PartitionSpec("rows"), PartitionSpec(None, "rows"), PartitionSpec()):
        there = jax.device_put(x, NamedSharding(mesh, spec))
        assert np.array_equal(jax.jit(agj.softmax)(there), ag.softmax(x))
    print("done")
    """
    assert run_script(script, XLA_FLAGS="--xla_force_host_platform_device_count=2").stdout == "done\n"


def test_the_interpreter_ends_while_results_live(run_script):
    script = """
    import sys
    import jax, jax.numpy as jnp
    import ascend_grad.jax as agj
    sys.kept = [jax.jit(agj.softmax)(jnp.zeros(n)) for n in (16, 9 << 20)]
    print("done")
    """
    assert run_script(script).stdout == "done\n"


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_bad_arguments():
    x, mask = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 1, 2, 2), bool)
    cases = (
        (agj.softmax, (None,), NULL, "input: expected an array, got None"),
        (agj.softmax, ([1.0],), TYPE, "input: expected an array of jax or NumPy, or a number, got list [1.0]"),
        (agj.softmax, (np.ma.zeros(3),), TYPE, "input: expected"),
        (agj.softmax, (np.matrix([[1.0]]),), TYPE, "input: expected"),
        (agj.softmax, (jax.random.key(0),), TYPE, "input: expected dtype float32, float16, bfloat16 or float64, got"),
        (agj.log_softmax, (x, 4), INVALID, "axis: expected a value in [-4, 3], got 4"),
        (agj.log_softmax, (x, 1.5), TYPE, "axis: expected an int, got float 1.5"),
        (agj.scaled_masked_softmax, (x, None), NULL, "mask: expected an array, got None"),
        (agj.scaled_masked_softmax, (x, x), TYPE, "mask: expected dtype bool, got float64"),
        (agj.scaled_masked_softmax, (x[0], mask), INVALID, "x: expected rank 4, got rank 3"),
        (agj.scaled_masked_softmax, (x, mask[..., :1]), INVALID, "mask: expected shape"),
        (agj.scaled_masked_softmax, (x, mask, "a"), TYPE, "scale: expected a real number, got str 'a'"),
    )
    for function, arguments, kind, message in cases:
        error = outcome(function, *arguments)
        assert type(error) is kind
        assert str(error).startswith(f"{function.__name__}: {message}")


def test_traced_settings():
    x, mask = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 1, 2, 2), bool)
    expected = (
        r": expected a value known when JAX traces, got a tracer; name the argument in static_argnames of jax.jit"
    )
    with pytest.raises(ag.ParamTypeError, match=f"softmax: axis{expected}"):
        jax.jit(agj.softmax)(x, 1)
    with pytest.raises(ag.ParamTypeError, match=f"scaled_masked_softmax: scale{expected}"):
        jax.jit(agj.scaled_masked_softmax)(x, mask, 2.0)
    assert_identical(np.asarray(jax.jit(agj.softmax, static_argnames="axis")(x, axis=1)), np.ones((1, 1, 2, 2)))


GOOD = {"operator": "softmax_backward", "axis": np.int64(-1), "scale": np.float64(1)}
SPOILED = {
    "operator": {"operator": "softmin"},
    "operator's type": {"operator": np.int64(0)},
    "operator's beginning": {"operator": "softmax_backward_and_more"},
    "axis": {"axis": np.int64(-3)},
    "axis from the front": {"axis": np.int64(0)},
    "axis's type": {"axis": np.int32(-2)},
    "scale's type": {"scale": np.float32(2)},
}


def call(*arrays, result=None, **attributes):
    result = jax.ShapeDtypeStruct((2, 3), jnp.float32) if result is None else result
    return jax.ffi.ffi_call("ascend_grad_rowwise", result)(*arrays, **attributes)


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_attributes_that_xla_hands_over(spoiled):
    x = jnp.zeros((2, 3), jnp.float32)
    assert_identical(np.asarray(call(x, x, **GOOD)), np.zeros((2, 3), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
        call(x, x, **GOOD | spoiled)
    for name in GOOD:
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(x, x, **{other: value for other, value in GOOD.items() if other != name})


def test_buffers_that_xla_hands_over():
    x = jnp.zeros((2, 3), jnp.float32)
    mask = jnp.zeros((2, 3), bool)
    for arrays in (
        (),
        (x,),
        (x, x, x),
        (x, mask),
        (x, x.astype(jnp.float16)),
        (x.astype(jnp.float64), x.astype(jnp.float64)),
        (x[:, :2], x),
        (x, x[0]),
        (x[None], x[None]),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(*arrays, **GOOD)
    for shape, dtype in (((), jnp.float32), ((2, 3), jnp.int32), ((2, 3), bool)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(x, x, result=jax.ShapeDtypeStruct(shape, dtype), **GOOD)
    two = [jax.ShapeDtypeStruct((2, 3), jnp.float32)] * 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
        call(x, x, result=two, **GOOD)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
        call(x, x, **GOOD | {"operator": "scaled_masked_softmax"})


def test_sizes_that_wrap_around():
    """Buffers whose sizes wrap around are an error, and nothing is written. XLA itself has no such buffers."""
    x = np.zeros((2, 2), np.float32)
    for dims in ((2**31, 2**31 + 1), (2**33, 2**33), (2**62, 4), (2**61,), (-2, -2), (2**32, 2**31)):
        assert "ascend_grad: shapes or dtypes do not match" in called_by_xla(x, dims)
    assert "ascend_grad: shapes or dtypes do not match" in called_by_xla(x, (2, 2), 2**64 - 8)
    assert not x.any()
    assert called_by_xla(x, (2**60, 0)) == ""
    assert called_by_xla(x, (2, 2)) == ""
    assert (x == 0.5).all()


def test_any_dimension_of_masked():
    """The kernel of the masked softmax is right for any dimension, although the functions use only the last one."""
    x, mask = normal((2, 3, 40, 50), np.float32), generator("mask").random((2, 3, 40, 50)) < 0.4
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for axis in (-2, -3, -4):
        settings = {"operator": "scaled_masked_softmax", "axis": np.int64(axis), "scale": np.float64(0.5)}
        got = call(jnp.asarray(x), jnp.asarray(mask), result=result, **settings)
        turned = (np.ascontiguousarray(np.moveaxis(each, axis, -1)) for each in (x, mask))
        assert_close(got, np.moveaxis(ag.scaled_masked_softmax(*turned, 0.5), -1, axis), "float32")


def large_result(name: str) -> jax.Array:
    """Return a result above the size from which the library advises huge pages, of a compiled call of XLA."""
    x = jnp.zeros((_memory.HUGE_THRESHOLD // 4096 + 600, 1024), jnp.float32)
    if name == "softmax":
        return jax.jit(agj.softmax)(x)
    target = jnp.zeros(len(x), jnp.int32)
    if name == "cross_entropy":
        return jax.jit(jax.grad(agj.cross_entropy))(x, target)
    return jax.jit(jax.grad(agj.linear_cross_entropy, 1))(x[:2], x, target[:2])


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "linear_cross_entropy"])
def test_large_results_have_huge_pages(name):
    """Linux marks the memory in the middle of a large result as "hg", if the system has huge pages."""
    result = large_result(name).block_until_ready()
    middle = result.unsafe_buffer_pointer() + result.nbytes // 2
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    ranges = (re.match("([0-9a-f]+)-([0-9a-f]+) ", line) for line in lines)
    next(r for r in ranges if r and int(r[1], 16) <= middle < int(r[2], 16))
    flags = next(line for line in lines if line.startswith("VmFlags:")).split()
    assert ("hg" in flags) == Path("/sys/kernel/mm/transparent_hugepage").exists()


# ---- documents -------------------------------------------------------------------------------------------------------


def test_the_api_reference_lists_every_public_name():
    listed = re.findall(r"^   jax\.(\w+)$", (SOURCES / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(agj.__all__)
