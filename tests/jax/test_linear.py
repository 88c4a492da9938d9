"""Test the loss of a linear layer within JAX: its values, gradients and transformations, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import loss_oracle
import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, outcome
from linear_samples import Shape
from loss_samples import OPTIONS, arguments_of
from samples import assert_identical, generator

import ascend_grad as ag
import ascend_grad.jax as agj

SHAPE = Shape(40, 50, 12)
#: The expectation that the error of an array argument names.
ARRAY = "an array of jax or NumPy, or a number"
LAYER = ("input", "weight", "bias")


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


def problem_of(option: str, dtype: str, reduction: str = "mean", shape: Shape = SHAPE) -> tuple[dict, dict, Any]:
    """Make the arrays of a call, its settings, and the upstream gradient of the loss."""
    arguments = arguments_of(shape, dtype, option, reduction)
    # The function for JAX has no shards of a vocabulary.
    first, target = arguments.pop("vocab_start_index"), arguments["target"]
    arguments["target"] = np.where(target == -7, -7, target - first)
    upstream = arguments.pop("grad_loss")
    arrays = {name: each for name, each in arguments.items() if isinstance(each, np.ndarray)}
    return arrays, {name: each for name, each in arguments.items() if name not in arrays}, upstream


def loss_of(arrays: dict, settings: dict):
    """Return a compiled function of a layer's arrays, whose results are a named tuple, and these arrays."""
    layer = {name: jnp.asarray(arrays[name]) for name in LAYER if name in arrays}
    others = {name: jnp.asarray(each) for name, each in arrays.items() if name not in layer}

    @jax.jit
    def function(layer):
        result = agj.linear_cross_entropy(**layer, **others, **settings)
        return result if settings.get("outputs") else ag.LossResult(result)

    return function, layer


def results_of(function, *arguments) -> list[str]:
    """Return the results of the calls of the compiled function in a program."""
    return re.findall(r"\('results', '([^']*)'\)", str(jax.make_jaxpr(function)(*arguments)))


def assert_same_gradients(got: dict, right) -> None:
    for name, each in got.items():
        assert_identical(np.asarray(each), getattr(right, f"{name}_grad"))


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_bits_of_the_call_of_arrays(option, dtype):
    arrays, settings, _ = problem_of(option, dtype)
    function, layer = loss_of(arrays, settings)
    # Values whose gradients are not needed are computed without gradients, in a separate sweep.
    right = ag.linear_cross_entropy(**arrays, **settings, return_grad=False)
    found = function(layer)
    for name, each in found._asdict().items():
        assert (each is None) == (name not in ("loss", *settings.get("outputs", ())))
        if each is not None:
            assert_identical(np.asarray(each), getattr(right, name))
    if dtype != "float16":  # its gradients are scaled before they are rounded
        # JAX leaves out unused outputs, which decide whether rows of weight 0 count.
        right = ag.linear_cross_entropy(**arrays, **{**settings, "outputs": ()})
        assert_same_gradients(jax.grad(lambda layer: function(layer).loss)(layer), right)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_the_definition(option, reduction):
    """Gradients of the loss and of outputs agree with the formulas in float64, for any upstream gradients."""
    arrays, settings, grad_loss = problem_of(option, "float64", reduction)
    names = [name for name in ("lse", "log_prob", "entropy") if name in settings.get("outputs", ())]
    random = generator("upstream", option, reduction)
    ids = arrays["target"]
    above = {name: random.standard_normal(ids.shape if name == "log_prob" else SHAPE.BT) for name in names}
    function, layer = loss_of(arrays, settings)

    def total(layer):
        found = function(layer)
        return jnp.sum(grad_loss * found.loss) + sum(
            jnp.sum(each * getattr(found, name)) for name, each in above.items()
        )

    rows = loss_oracle.Rows(np.float64, {**arrays, **settings, "grad_loss": grad_loss})
    is_target = ids != settings["ignore_index"]
    counted = {
        f"grad_{name}": np.where(is_target if name == "log_prob" else rows.counted, each, 0)
        for name, each in above.items()
    }
    right = loss_oracle.gradients(rows, 2.0**-53, bfloat16=False, **counted)
    for name, each in jax.grad(total)(layer).items():
        wanted = right[f"{name}_grad"].value
        tolerance = 1e-3 if each.dtype == np.float16 else 1e-11  # a bias has a separate dtype
        np.testing.assert_allclose(np.float64(each), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("option", ["outputs", "temperature", "all"])
def test_gradients_of_outputs_have_the_bits_of_the_call_of_arrays(option, dtype):
    arrays, settings, _ = problem_of(option, dtype)
    function, layer = loss_of(arrays, settings)
    found = function(layer)
    above = generator("upstream").standard_normal(SHAPE.BT).astype(found.entropy.dtype)

    def total(layer):
        found = function(layer)
        return 0.5 * found.loss + (found.entropy * above).sum()

    gradients = jax.jit(jax.grad(total))(layer)
    statistics = {name: np.asarray(getattr(found, name)) for name in ("lse", "entropy")}
    rest = {name: each for name, each in settings.items() if name != "outputs"}
    right = ag.linear_cross_entropy_backward(**arrays, **rest, **statistics, grad_loss=0.5, grad_entropy=above)
    assert_same_gradients(gradients, right)


@pytest.mark.parametrize(("dtype", "reduction"), [("float32", "none"), ("float16", "mean"), ("float16", "sum")])
def test_losses_of_rows_and_of_float16_take_the_upstream_gradient_first(dtype, reduction):
    arrays, settings, grad_loss = problem_of("no option", dtype, reduction)
    function, layer = loss_of(arrays, settings)
    above = jnp.asarray(grad_loss, jnp.float32) * 2**12  # the scale of a loss
    gradients = jax.grad(lambda layer: (above * function(layer).loss).sum())(layer)
    right = ag.linear_cross_entropy(**arrays, **settings, grad_loss=np.asarray(above))
    assert_same_gradients(gradients, right)


def test_finite_differences():
    arrays, settings, _ = problem_of("all", "float64", shape=Shape(5, 7, 3))
    function, layer = loss_of(arrays | {"bias": arrays["bias"].astype(np.float64)}, settings)

    def total(layer):
        found = function(layer)
        return found.loss + 0.3 * (found.lse**2).sum() + found.entropy.sum()

    jax.test_util.check_grads(total, (layer,), order=1, modes=["rev"])


def test_only_gradients_that_are_needed_are_computed():
    arrays, settings, _ = problem_of("bias", "float32")
    function, layer = loss_of(arrays, settings)
    for name in LAYER:
        gradient = jax.grad(lambda each, name=name: function({**layer, name: each}).loss)
        assert results_of(gradient, layer[name]) == [f"loss {name}_grad"]
    assert results_of(function, layer) == ["loss"]


def test_gradients_are_computed_once():
    """Gradients come with the loss, or in the backward pass if an output is requested that has a gradient."""
    arrays, settings, _ = problem_of("no option", "float32")
    for outputs, together in ((("predicted", "correct"), True), (("correct", "lse"), False), (("entropy",), False)):
        function, layer = loss_of(arrays, settings | {"outputs": outputs})
        of_loss = results_of(jax.grad(lambda layer, f=function: f(layer).loss), layer)
        gradients = [each for each in of_loss if "grad" in each]
        names = [*outputs, "input_grad", "weight_grad"] if together else ["input_grad", "weight_grad"]
        assert gradients == [" ".join(["loss", *names])]
        assert len(of_loss) == 2 - together

    def total(layer):
        found = function(layer)
        return found.loss - 0.01 * found.entropy.mean()

    assert results_of(jax.grad(total), layer) == ["loss entropy lse", "input_grad weight_grad"]


def test_results_while_jax_has_32_bits():
    arrays, settings, _ = problem_of("outputs", "float32")
    right = ag.linear_cross_entropy(**arrays, **settings)
    with jax.enable_x64(False):
        function, layer = loss_of(arrays, settings)
        found = function(layer)
    assert found.predicted.dtype == found.correct.dtype == np.int32
    for name, each in found._asdict().items():
        assert np.array_equal(each, getattr(right, name))


@pytest.mark.parametrize("shape", [Shape(0, 5, 3), Shape(4, 5, 0), Shape(4, 0, 3)], ids=str)
def test_sizes_of_0(shape):
    target = jnp.full(shape.BT, -100 if shape.V == 0 else 1)
    layer = jnp.ones((shape.BT, shape.H)), jnp.ones((shape.V, shape.H))
    right = ag.linear_cross_entropy(*map(np.asarray, (*layer, target)), reduction="sum")
    function = jax.value_and_grad(lambda x, w: agj.linear_cross_entropy(x, w, target, reduction="sum"), (0, 1))
    loss, (input_grad, weight_grad) = function(*layer)
    for got, wanted in zip((loss, input_grad, weight_grad), right, strict=True):
        assert_identical(np.asarray(got), wanted)


def test_temperatures_that_are_traced():
    """One traced number is the temperature of all rows, and numbers of any kind are accepted."""
    arrays, settings, _ = problem_of("no option", "float32")
    function = jax.jit(lambda temperature: agj.linear_cross_entropy(**arrays, **settings, temperature=temperature))
    right = ag.linear_cross_entropy(**arrays, **settings, temperature=0.5).loss
    for each in (0.5, jnp.float32(0.5), np.float64(0.5), jnp.full(SHAPE.BT, 0.5, jnp.bfloat16)):
        assert_identical(np.asarray(function(each)), right)
    assert_identical(np.asarray(agj.linear_cross_entropy(**arrays, **settings, temperature=0.5)), right)
    doubled = agj.linear_cross_entropy(**arrays, **settings, temperature=jnp.array(2))
    assert_identical(np.asarray(doubled), ag.linear_cross_entropy(**arrays, **settings, temperature=2.0).loss)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_batches_of_gradients():
    arrays, settings, _ = problem_of("all", "float32")
    function, layer = loss_of(arrays, settings)
    inputs = jnp.stack([layer["input"], 2 * layer["input"], -layer["input"]])

    def value(input):
        found = function({**layer, "input": input})
        return found.loss, found

    found, results = jax.jit(jax.vmap(jax.value_and_grad(value, has_aux=True)))(inputs)[::-1]
    for i, input in enumerate(inputs):
        right = ag.linear_cross_entropy(**{**arrays, "input": np.asarray(input)}, **settings)
        assert_identical(np.asarray(found[i]), right.input_grad)
        assert_identical(np.asarray(results[0][i]), right.loss)
        assert_identical(np.asarray(results[1].predicted[i]), right.predicted)
        assert results[1].correct is None


def test_within_loops_and_checkpoints():
    arrays, settings, _ = problem_of("no option", "float32")
    function, layer = loss_of(arrays, settings)
    plain = jax.grad(lambda layer: function(layer).loss)
    again = jax.grad(jax.checkpoint(lambda layer: function(layer).loss))
    step = jax.jit(lambda layer: jax.tree.map(lambda a, g: a - g, layer, plain(layer)))
    scanned, _ = jax.lax.scan(lambda layer, _: (step(layer), None), layer, length=3)
    for name, each in step(step(step(layer))).items():
        assert_identical(np.asarray(scanned[name]), np.asarray(each))
    for name, each in again(layer).items():
        assert_identical(np.asarray(each), np.asarray(plain(layer)[name]))


def test_large_problems_on_several_threads():
    """Results are right if the workspace is a separate mapping and several threads share the products."""
    shape = Shape(700, 20000, 300)
    arrays, settings, _ = problem_of("no option", "bfloat16", shape=shape)
    function, layer = loss_of(arrays, settings)
    gradients = jax.grad(lambda layer: function(layer).loss)(layer)
    assert_same_gradients(gradients, ag.linear_cross_entropy(**arrays, **settings))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_leading_dimensions_without_elements(shape):
    h, w, t = jnp.zeros(shape), jnp.zeros((5, shape[-1])), jnp.zeros(shape[:-1], jnp.int32)
    loss = agj.linear_cross_entropy(h, w, t, reduction="none")
    np.testing.assert_allclose(np.asarray(loss), np.full(shape[:-1], np.log(5)))


def test_leading_dimensions():
    rng = np.random.default_rng(3)
    x, w, t = jnp.asarray(rng.normal(size=(2, 3, 4))), jnp.asarray(rng.normal(size=(5, 4))), jnp.arange(6) % 5
    temperature = jnp.linspace(1, 2, 6)

    def losses(x, w, *rows):
        rows = [each.reshape(x.shape[:-1]) for each in (t, temperature)]
        return agj.linear_cross_entropy(x, w, rows[0], temperature=rows[1], reduction="none", outputs=("lse",))

    for function in (losses, jax.jit(losses)):
        result, flat = function(x, w), function(x.reshape(6, 4), w)
        for got, right in zip(result, flat, strict=True):
            assert_identical(np.asarray(got), np.asarray(right).reshape(2, 3))
    gradients = [jax.grad(lambda x, w: losses(x, w).loss.sum(), (0, 1))(each, w) for each in (x, x.reshape(6, 4))]
    for got, right in zip(*gradients, strict=True):
        assert_identical(np.asarray(got), np.asarray(right).reshape(got.shape))
    assert jax.vmap(losses, (0, None))(jnp.stack([x, x]), w).loss.shape == (2, 2, 3)


def test_bad_arguments():
    x, w, t = jnp.zeros((3, 2)), jnp.zeros((5, 2)), jnp.zeros(3, int)
    for arguments, settings, kind, message in (
        ((None, w, t), {}, NULL, "input: expected an array, got None"),
        ((x, w, None), {}, NULL, "target: expected an array, got None"),
        ((x, w.astype(jnp.float16), t), {}, TYPE, "weight: expected dtype float64"),
        ((x, w[:, :1], t), {}, INVALID, "weight: expected"),
        ((x, w, t[:2]), {}, INVALID, "target: expected shape"),
        ((x, w, [0, 1, 2]), {}, TYPE, "target: expected an array of jax or NumPy, or a number, got list"),
        ((x, w, x), {}, INVALID, "target: expected shape (3, 5), as floating targets are probabilities"),
        ((x, w[:0], x[:, :0]), {}, INVALID, "target: expected only class ids equal to ignore_index"),
        ((x, w, t), {"reduction": "middle"}, INVALID, "reduction: expected 'mean', 'sum' or 'none'"),
        ((x, w, t), {"temperature": 0.0}, INVALID, "temperature: expected a positive finite number, got 0.0"),
        ((x, w, t), {"temperature": w}, INVALID, "temperature: expected"),
        ((x, w, t), {"temperature": [1.0, 2.0, 3.0]}, TYPE, f"temperature: expected {ARRAY}, got list"),
        ((x, w, t), {"temperature": (1.0, -2.0, 3.0)}, TYPE, f"temperature: expected {ARRAY}, got tuple"),
        ((x, w, t), {"bias": t}, INVALID, "bias: expected"),
        ((x, w, t), {"softcap": -1.0}, INVALID, "softcap: expected a positive finite number, got -1.0"),
        ((x, w, t), {"label_smoothing": 1.5}, INVALID, "label_smoothing: expected a number in [0, 1], got 1.5"),
        ((x, w, t), {"outputs": ("logits",)}, INVALID, "outputs: expected"),
        ((x, w, t), {"num_threads": 0}, INVALID, "num_threads: expected"),
        ((x, w, t), {"ignore_index": 2**63}, INVALID, "ignore_index: expected"),
    ):
        error = outcome(agj.linear_cross_entropy, *arguments, **settings)
        assert issubclass(type(error), kind)
        assert str(error).startswith(f"linear_cross_entropy: {message}")


def test_traced_settings():
    arrays, settings, _ = problem_of("no option", "float32")
    with pytest.raises(ag.ParamTypeError, match=r"linear_cross_entropy: softcap: expected a value known when"):
        jax.jit(lambda cap: agj.linear_cross_entropy(**arrays, **settings, softcap=cap))(2.0)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_that_a_compiled_program_refuses(transform):
    x, w = jnp.zeros((3, 2)), jnp.zeros((5, 2))
    function = transform(lambda target, **options: agj.linear_cross_entropy(x, w, target, **options))
    for target, message in (
        ([0, -100, 5], r"target: expected values in \[0, 5\) or -100, got 5 in row 2"),
        ([-1, 0, 7], r"target: expected values in \[0, 5\) or -100, got -1 in row 0"),
        ([0, 1, 2**40], r"target: expected values in \[0, 5\) or -100, got 1099511627776 in row 2"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: linear_cross_entropy: {message}"):
            function(jnp.array(target)).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 5 in row 1\n"):
        function(jnp.array([[0, 1], [0, 5], [5, 5]]), target_prob=jnp.ones((3, 2))).block_until_ready()
    for value in (0, -1, jnp.inf, jnp.nan):
        temperature = jnp.array([1, value, 1], float)
        message = "temperature: expected positive finite numbers, got .* in row 1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            function(jnp.zeros(3, int), temperature=temperature).block_until_ready()


def test_derivatives_that_there_are_not():
    arrays, settings, _ = problem_of("all", "float64")
    function, layer = loss_of(arrays, settings)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda layer: function(layer).loss, (layer,), (layer,))
    for name in ("token_weight", "class_weight", "target_prob", "temperature"):

        def of_option(each, name=name):
            return agj.linear_cross_entropy(**{**arrays, name: each}, **settings).loss

        with pytest.raises(NotImplementedError, match=f"linear_cross_entropy: {name}: the loss has no gradient for it"):
            jax.grad(of_option)(jnp.asarray(arrays[name]))
        assert not jax.grad(lambda each, f=of_option: f(jax.lax.stop_gradient(each)))(jnp.asarray(arrays[name])).any()


TARGET = "ascend_grad_linear_cross_entropy"
GOOD: dict[str, Any] = {
    "arguments": "input weight target",
    "results": "loss",
    "reduction": "mean",
    "ignore_index": np.int64(-100),
    "num_threads": np.int64(0),
    **dict.fromkeys(("label_smoothing", "lse_square_scale", "denominator", "softcap", "filter_eps"), np.float64(0)),
    **dict.fromkeys(("temperature", "logit_scale"), np.float64(1)),
}


def call(*arrays, specs=(((), jnp.float32),), **changed):
    specs = [jax.ShapeDtypeStruct(*each) for each in specs]
    return jax.ffi.ffi_call(TARGET, specs)(*arrays, **GOOD | changed)


def test_calls_of_xla_that_do_not_fit():
    """The compiled function refuses attributes and buffers that do not fit a loss."""
    x, w, t = jnp.zeros((3, 2), jnp.float32), jnp.zeros((5, 2), jnp.float32), jnp.zeros(3, jnp.int32)
    n, rows = jnp.zeros(3, jnp.float32), ((3,), jnp.float32)
    loss = ((), jnp.float32)
    assert np.isclose(call(x, w, t)[0], np.log(5))
    with_bias = "input weight target bias"
    refused: list[tuple[tuple, dict[str, Any]]] = [
        ((x, w), {}),
        ((x, w, t, t), {}),
        ((x, w, n), {}),
        ((x, x[:, :1], t), {}),
        ((x, w.astype(jnp.float64), t), {}),
        ((t[:, None], t[:, None], t), {}),
        ((x, w, t[:2]), {}),
        ((x, w, t[:, None]), {}),
        ((x[None], w[None], t), {}),
        ((x, w, t), {"arguments": "input target weight"}),
        ((x, w, t), {"arguments": "input weight"}),
        ((x, w, t, n), {"arguments": with_bias}),
        ((x, w, t, t), {"arguments": with_bias}),
        ((x, w, t, n), {"arguments": "input weight target unknown"}),
        ((x, w, t, n), {"arguments": "input weight target grad_loss"}),
        ((x, w, t, n[:1]), {"arguments": "input weight target token_weight"}),
        ((x, w, t), {"results": "unknown"}),
        ((x, w, t), {"results": "loss loss", "specs": (loss, loss)}),
        ((x, w, t), {"specs": (rows,)}),
        ((x, w, t), {"reduction": "none"}),
        ((x, w, t), {"reduction": "middle"}),
        ((x, w, t), {"results": "loss lse", "specs": (loss, ((2,), jnp.float32))}),
        ((x, w, t), {"results": "loss predicted", "specs": (loss, rows)}),
        ((x, w, t), {"results": "loss input_grad", "specs": (loss, ((2, 3), jnp.float32))}),
        ((x, w, t), {"results": "loss weight_grad", "specs": (loss, ((5, 2), jnp.float16))}),
        ((x, w, t), {"results": "loss bias_grad", "specs": (loss, rows)}),
        ((x, w, t, n), {"arguments": "input weight target lse"}),
        ((x, w, t[:, None], n[:, None]), {
            "arguments": "input weight target target_prob", "results": "loss log_prob", "specs": (loss, rows)
        }),
    ]  # fmt: skip
    for name in GOOD:
        wrong = np.float32(3) if name not in ("arguments", "results", "reduction") else np.int64(3)
        refused.append(((x, w, t), {name: wrong}))
    for arrays, changed in refused:
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(*arrays, **changed)


@pytest.mark.parametrize("outputs", [(), ("lse", "entropy")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_probabilities_of_all_classes(reduction, outputs):
    random = generator("jax", "dense")
    x, w, q = random.standard_normal((11, 4)), random.standard_normal((6, 4)), random.random((11, 6))
    options = {"reduction": reduction, "label_smoothing": 0.2, "class_weight": random.random(6)}
    with jax.enable_x64(True):
        arrays = [jnp.asarray(each) for each in (x, w)]

        def loss(x, w, q):
            result = agj.linear_cross_entropy(x, w, q, **options, outputs=outputs)
            each = result if outputs else (result,)
            return sum(jnp.sum(value) for value in each)

        found, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays, jnp.asarray(q))

        def definition(x, w, q):
            z, c = x @ w.T, options["class_weight"]
            lse = jax.scipy.special.logsumexp(z, axis=-1)
            losses = (c * (0.8 * q + 0.2 / 6) * (lse[:, None] - z)).sum(-1)
            of_outputs = jnp.sum(2 * lse - (jax.nn.softmax(z) * z).sum(-1)) if outputs else 0
            return (losses.mean() if reduction == "mean" else losses.sum()) + of_outputs

        right, expected = jax.value_and_grad(definition, argnums=(0, 1))(*arrays, jnp.asarray(q))
        np.testing.assert_allclose(found, right, rtol=1e-12)
        for ours, theirs in zip(gradients, expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
        with pytest.raises(NotImplementedError, match="linear_cross_entropy: target: the loss has no gradient for it"):
            jax.grad(loss, argnums=2)(*arrays, jnp.asarray(q))
