"""Test JAX's arrays as arguments and results of the functions that take arrays of any library."""

from __future__ import annotations

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_calls import linear_results, rowwise_results
from faults import INVALID, TYPE, assert_refused_beside, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, problem_of
from producers import Exchanged
from python_threads import empty_on_threads, in_threads
from samples import DTYPES, assert_identical, pairs_of_results

import ascend_grad as ag
from ascend_grad import arguments


def jax_array(array: np.ndarray) -> jax.Array:
    """Make an array of the same values by JAX alone, whether 64-bit values are enabled or not."""
    with jax.enable_x64(True):
        return jnp.array(np.array(array))


def assert_same(results, expected) -> None:
    for result, right in pairs_of_results(results, expected):
        assert isinstance(result, jax.Array)
        assert_identical(np.asarray(result), right)


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def _mode(request: pytest.FixtureRequest):
    """Run tests with and without 64-bit values enabled in JAX. Tests may pass float64 arrays in both cases."""
    with jax.enable_x64(request.param):
        yield


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 0, 3, 3)], ids=str)
def test_rowwise_operators(operator, dtype, shape, backend):
    assert_same(*rowwise_results(jax_array, operator, dtype, shape, backend))


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("operator", LINEAR)
def test_linear_operators(operator, dtype):
    assert_same(*linear_results(jax_array, operator, dtype))


def test_logits_and_losses_of_each_token(dtype):
    statistics = problem_of(STATISTICS, (19, 33, 21), dtype)
    for problem in (statistics.replaced(return_logits=True), statistics.replaced(return_logits=False)):
        results = ag.fused_linear_online_max_sum(**problem.mapped(jax_array).arguments)
        assert_same(results, ag.fused_linear_online_max_sum(**problem.arguments))
    problem = problem_of(WHOLE, (19, 33, 21), dtype, reduction="none")
    results = ag.linear_cross_entropy(**problem.mapped(jax_array).arguments, output_mask=(True, False))
    assert_same(results, ag.linear_cross_entropy(**problem.arguments, output_mask=(True, False)))


@settings(max_examples=20)  # JAX compiles code for each example
@given(data=st.data())
def test_any_shape_and_transposition(data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=6))
    x = (
        np.sin(np.arange(np.prod(shape, dtype=int)))
        .reshape(shape)
        .astype(data.draw(st.sampled_from([*DTYPES.values()])))
    )
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(-max(x.ndim, 1), max(x.ndim, 1) - 1))
    given = jax_array(x).transpose(order)
    assert_same(
        ag.softmax_backward(given, given, axis), ag.softmax_backward(x.transpose(order), x.transpose(order), axis)
    )


def test_numbers_and_weak_types():
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    result = ag.softmax(weak)
    assert (result.shape, result.dtype, result.weak_type) == ((), jnp.float32, False)
    mask, x = jnp.zeros((1, 1, 2, 2), bool), jnp.zeros((1, 1, 2, 2))
    assert np.all(ag.scaled_masked_softmax(x, mask, jnp.float32(2)) == 0.5)
    assert ag.softmax(jnp.zeros((2, 3)), jnp.int32(0))[0, 0] == 0.5


def test_arrays_whose_values_are_still_computed():
    """A call on an array that JAX still computes gives the right result."""
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y @ y), x))
    x = jnp.full((200, 200), 0.01)
    right = ag.softmax(np.asarray(compute(x)))
    for _ in range(5):
        assert_identical(np.asarray(ag.softmax(compute(x))), right)


def test_results_may_be_used_as_any_array():
    result = ag.softmax(jnp.zeros((2, 4)))
    assert result.devices() == {jax.devices("cpu")[0]}
    assert np.all(jax.jit(lambda x: x + 1)(result) == 1.25)
    assert np.all(jax.grad(lambda x: (x * x).sum())(result) == 0.5)
    assert np.all(result.at[0].set(1)[1] == 0.25)


def test_calls_on_arrays_with_values_while_others_are_traced(dtype):
    constant = np.linspace(0, 1, 12).reshape(3, 4).astype(DTYPES[dtype])
    given = jax_array(constant)
    with jax.enable_x64(True):
        result = jax.jit(lambda x: x + ag.softmax(given))(jax_array(np.zeros_like(constant)))
    assert_same(result, ag.softmax(constant))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_inputs_are_read_where_they_are(dtype):
    for shape in ((5,), (300, 7), ()):
        x = jax_array(np.ones(shape, DTYPES[dtype]))
        view = arguments.converted(x, "x")
        assert view.ctypes.data == x.unsafe_buffer_pointer()
        assert not view.flags.writeable


@pytest.fixture
def addresses(monkeypatch) -> list[tuple[int, int]]:
    """Record the addresses at which results were computed, and the addresses of JAX's arrays over them."""
    pairs: list[tuple[int, int]] = []
    original = jnp.from_dlpack

    def noting(exported):
        result = original(exported)
        pairs.append((np.from_dlpack(exported).ctypes.data, result.unsafe_buffer_pointer()))
        return result

    monkeypatch.setattr(jnp, "from_dlpack", noting)
    return pairs


@pytest.mark.parametrize("elements", [1, 7, 1000, 100_003, 9 << 20])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_results_share_memory(elements, kind, addresses):
    kept = [ag.softmax(jax_array(np.zeros(elements, kind))) for _ in range(8)]
    assert len(addresses) == len(kept)
    for computed, lies in addresses:
        assert computed == lies
        assert computed % 64 == 0


def test_results_of_linear_operators_share_memory(addresses):
    problem = problem_of(WHOLE, (19, 33, 21), "float32", reduction="none")
    ag.linear_cross_entropy(**problem.mapped(jax_array).arguments)
    problem = problem_of(LOSS, (19, 33, 21), "float32")
    ag.fused_cross_entropy_loss_with_max_sum(**problem.mapped(jax_array).arguments)
    problem = problem_of(STATISTICS, (19, 33, 21), "float32")
    ag.fused_linear_online_max_sum(**problem.mapped(jax_array).arguments)
    assert len(addresses) >= 3 + 1 + 3
    for computed, lies in addresses:
        assert computed == lies


def test_inputs_are_not_modified():
    x = jnp.linspace(0, 1, 12).reshape(3, 4)
    before = np.array(x)
    ag.softmax_backward(x, x)
    assert_identical(np.asarray(x), before)


# ---- out -------------------------------------------------------------------------------------------------------------


def test_jax_arrays_are_never_written():
    x, out = jnp.linspace(0, 1, 6), jnp.zeros(6)
    for function in (ag.softmax, ag.log_softmax):
        error = outcome(function, x, out=out)
        assert type(error) is INVALID
        assert error.code == 161002
        assert "out: expected a writable array, got a read-only one" in str(error)
    assert type(outcome(ag.softmax, x, out=x)) is INVALID
    assert not np.any(out)
    problem = problem_of(LOSS, (9, 17, 5), "float32")
    error = outcome(
        ag.fused_cross_entropy_loss_with_max_sum,
        **problem.mapped(jax_array).arguments,
        out=(jnp.zeros(9), jnp.zeros((9, 17))),
    )
    assert "out[0]: expected a writable array" in str(error)


def test_references_are_no_out():
    error = outcome(ag.softmax, jnp.zeros(3), out=jax.new_ref(jnp.zeros(3)))
    assert type(error) is TYPE
    assert "out: expected a writable array, got " in str(error)


def test_outs_of_numpy_are_numpys():
    error = outcome(ag.softmax, jnp.zeros(3), out=np.zeros(3, np.float32))
    assert "out: expected an array of jax, as the inputs are, got one of numpy" in str(error)


# ---- several libraries -----------------------------------------------------------------------------------------------


def test_libraries_do_not_mix():
    x = np.zeros((2, 3), np.float32)
    for other, name in ((x, "numpy"), (Exchanged(x), "exchanged_arrays")):
        error = outcome(ag.softmax_backward, jnp.array(x), other)
        assert type(error) is TYPE
        assert f"output: expected an array of jax, like grad_output, got one of {name}" in str(error)
        error = outcome(ag.softmax_backward, other, jnp.array(x))
        assert type(error) is TYPE
        assert f"output: expected an array of {name}, like grad_output, got one of jax" in str(error)


@pytest.mark.parametrize("operator", [GRADIENT, STATISTICS, WHOLE])
def test_targets_and_masks_may_be_numpys(operator):
    problem = problem_of(operator, (9, 17, 5), "float32")
    vectors = ("target", "masked_target", "target_mask")
    expected = getattr(ag, operator)(**problem.arguments)
    mixed = problem.mapped(jax_array).arguments
    mixed |= {name: value for name, value in problem.arguments.items() if name in vectors}
    assert_same(getattr(ag, operator)(**mixed), expected)


# ---- refused arguments -----------------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[object, str]]:
    deleted, donated = jnp.zeros(3), jnp.zeros(3)
    deleted.delete()
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    return {
        "deleted": (deleted, "got one that was deleted or donated"),
        "donated": (donated, "got one that was deleted or donated"),
        "key": (jax.random.key(0), "Use jax.random.key_data(arr)"),
        "int4": (jnp.zeros(3, jnp.int4), "type S4 has no DLPack equivalent"),
        "float8": (jnp.zeros(3, jnp.float8_e4m3fn), "NumPy has no dtype for DLPack's (10, 8 bits, 1 lanes)"),
        "int": (jnp.zeros(3, jnp.int32), "got int32"),
        "bool": (jnp.zeros(3, bool), "got bool"),
        "complex": (jnp.zeros(3, jnp.complex64), "got complex64"),
        "shape alone": (jax.ShapeDtypeStruct((3,), jnp.float32), "got object"),
        "reference": (jax.new_ref(jnp.zeros(3)), "expected an array, got Ref"),
    }


@pytest.mark.parametrize("name", refused())
def test_arrays_that_are_refused(name):
    value, message = refused()[name]
    assert_refused_beside(value, jnp.zeros(3), message)


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x)[0, 0]), lambda f: lambda x: jax.jvp(f, (x,), (x,))],
    ids=["jit", "vmap", "grad", "jvp"],
)
def test_traced_arrays(transform):
    with pytest.raises(ag.ParamTypeError) as info:
        transform(ag.softmax)(jnp.zeros((2, 3)))
    expected = r"^softmax: input: expected an array with values, got a tracer of shape .*; use ascend_grad.jax"
    assert re.search(expected, str(info.value))


def test_traced_numbers():
    x, mask = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 1, 2, 2), bool)
    with pytest.raises(ag.ParamTypeError, match="scale: expected a real number, got "):
        jax.jit(lambda scale: ag.scaled_masked_softmax(x, mask, scale))(2.0)
    with pytest.raises(ag.ParamTypeError, match="axis: expected an int, got "):
        jax.jit(lambda axis: ag.softmax(x, axis))(1)


TWO_DEVICES = """
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import ascend_grad as ag
mesh = jax.make_mesh((2,), ("rows",))
x = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
for spec in (PartitionSpec("rows"), PartitionSpec()):
    there = jax.device_put(x, NamedSharding(mesh, spec))
    for pair in ((there, jnp.array(x)), (jnp.array(x), there)):
        try:
            ag.softmax_backward(*pair)
        except ag.ParamTypeError as error:
            assert error.code == 161002
            expected = "expected an array on one device, got one on 2 devices; pass jax.device_put("
            assert expected in str(error)
        else:
            raise AssertionError
    shard = there.addressable_shards[1].data
    assert np.array_equal(ag.softmax(shard), ag.softmax(np.asarray(shard)))
second = jax.device_put(x, jax.devices()[1])
result = ag.softmax(second)
assert np.array_equal(result, ag.softmax(x)) and result.devices() == {jax.devices()[0]}
print("done")
"""


def test_several_devices(run_script):
    result = run_script(TWO_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert result.stdout == "done\n"


# ---- lifetime of results ---------------------------------------------------------------------------------------------


def test_a_result_outlives_everything_else():
    x = jnp.zeros((300, 4))
    result = ag.softmax(x)
    view = np.asarray(result)
    x.delete()
    del x, result
    gc.collect()
    np.full((300, 4), 7.0)  # this array would overwrite the result if its memory were free
    assert np.all(view == 0.25)


@pytest.mark.parametrize("elements", [16, 9 << 20])
def test_results_may_be_donated(elements):
    """JAX may reuse or copy a donated result's memory. Later results do not use this memory."""
    with jax.enable_x64(False):
        result = ag.softmax(jnp.zeros(elements))
        doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(result)
    del result
    gc.collect()
    others = [ag.softmax(jnp.zeros(elements)) for _ in range(2)]
    assert np.all(np.asarray(doubled) == np.float32(2 / elements))
    assert np.all(np.asarray(others[0]) == np.float32(1 / elements))


@pytest.mark.parametrize("elements", [16, 9 << 20])
def test_a_result_is_freed_on_any_thread(elements):
    results = [ag.softmax(jnp.zeros(elements)) for _ in range(4)]
    empty_on_threads(results)


def test_calls_from_several_threads():
    x = np.linspace(0, 1, 6000).reshape(60, 100).astype(np.float32)
    right, results = ag.softmax(x), []

    def work() -> None:
        for _ in range(20):
            results.append(ag.softmax(jnp.array(x)))

    in_threads(work, work, work)
    assert len(results) == 60
    assert all(np.array_equal(result, right) for result in results)
