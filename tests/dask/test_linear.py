"""Test that operators of a linear layer over chunks of tokens equal the undivided computation."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask_chunks import assert_identical, cuts
from hypothesis import given
from hypothesis import strategies as st
from linear_samples import TOP_K, WHOLE, LinearProblem, Shape, values_of
from linear_samples import problem_of as sample_of
from loss_samples import OPTIONS, arguments_of, check
from samples import DTYPES, generator

import ascend_grad as ag
import ascend_grad.dask as agd
from ascend_grad.dask import tasks


def problem_of(shape: Shape, dtype: str, kind: str = "centred", **arguments) -> LinearProblem:
    """Make a problem in which some tokens of the first half are ignored."""
    x, weight, _, constant = values_of(kind, shape, DTYPES[dtype])
    random = generator("dask", shape)
    target = random.integers(0, shape.V, shape.BT)
    target[: shape.BT // 2][random.random(shape.BT // 2) < 0.6] = -100
    return LinearProblem(WHOLE, {"input": x, "weight": weight, "target": target} | arguments, constant)


def cut(problem: LinearProblem, tokens: tuple[int, ...]) -> tuple:
    """Call the function on dask arrays, and return loss and gradients that are not yet computed."""
    arguments = dict(problem.arguments)
    arguments["input"] = da.from_array(arguments["input"], chunks=(tokens, -1))
    for name in ("target", "grad_loss"):
        if np.ndim(arguments.get(name)):
            arguments[name] = da.from_array(arguments[name], chunks=(tokens,))
    return agd.linear_cross_entropy(**arguments)


@given(
    st.sampled_from([Shape(1, 3, 2), Shape(7, 48, 2), Shape(31, 15, 47), Shape(63, 31, 64), Shape(97, 64, 97)]),
    st.sampled_from(tuple(DTYPES)),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from(["centred", "positive", "constant", "peaked"]),
    st.data(),
)
def test_chunks_together_are_the_whole_problem(default_engine, shape, dtype, reduction, kind, data):
    problem = problem_of(shape, dtype, kind, reduction=reduction)
    result = cut(problem, data.draw(cuts(shape.BT)))
    values = dask.compute(*result, scheduler="synchronous")
    for lazy, value in zip(result, values):
        assert (lazy.shape, lazy.dtype) == (value.shape, value.dtype)
    default_engine.assert_solved(problem, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_scheduler_gives_the_same_bits(dtype, reduction, compute):
    problem = problem_of(Shape(63, 31, 16), dtype, reduction=reduction)
    result = cut(problem, (9,) * 7)
    for value, expected in zip(compute(*result), dask.compute(*result, scheduler="synchronous")):
        assert_identical(value, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weight_gradients_of_chunks_are_added_up_in_float32(dtype, default_engine):
    """The sum of two hundred weight gradients is rounded to 16 bits once.

    If each gradient were rounded, the error would exceed the bound.
    """
    problem = problem_of(Shape(200, 5, 8), dtype, "positive", reduction="sum")
    default_engine.assert_solved(problem, dask.compute(*cut(problem, (1,) * 200), scheduler="synchronous"))


def test_weight_gradients_are_added_up_in_pairs():
    """Weight gradients are added up in pairs, and in pairs of pairs, in the order of the chunks.

    If the number is odd, the last gradient is added last. Other orders of summation give other bits.
    """
    parts = np.array([1e8, 1, -1e8, 1, 3, -7, 1e7], np.float32)
    x, weight, target = parts[:, None], np.zeros((2, 1), np.float32), np.zeros(7, np.int64)
    result = agd.linear_cross_entropy(da.from_array(x, chunks=(1, 1)), weight, target, reduction="sum")
    a, b, c, d, e, f, g = -parts / 2
    expected = ((a + b) + (c + d)) + ((e + f) + g)
    assert_identical(result.weight_grad.compute()[0, 0], expected)
    assert expected != ((e + f) + (c + d)) + ((a + b) + g)
    assert expected != ((((((a + b) + c) + d) + e) + f) + g)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_token_that_counts(reduction, dtype):
    problem = problem_of(Shape(6, 5, 4), dtype, reduction=reduction)
    problem.arguments["target"][:] = -100
    problem.arguments["input"][:] = np.nan
    loss, input_grad, weight_grad = dask.compute(*cut(problem, (4, 2)), scheduler="synchronous")
    expected = np.nan if reduction == "mean" else np.zeros(6 if reduction == "none" else ())
    np.testing.assert_array_equal(loss, expected)
    assert not input_grad.any()
    assert not weight_grad.any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [Shape(0, 5, 4), Shape(3, 0, 4), Shape(3, 5, 0)])
def test_without_tokens_words_or_features(shape, dtype):
    x, weight = np.ones((shape.BT, shape.H), dtype), np.ones((shape.V, shape.H), dtype)
    target = np.full(shape.BT, -100 if shape.V == 0 else 2)
    tokens = (2, 1) if shape.BT else (0,)
    for reduction in ("mean", "sum", "none"):
        lazily = agd.linear_cross_entropy(da.from_array(x, chunks=(tokens, -1)), weight, target, reduction=reduction)
        at_once = ag.linear_cross_entropy(x, weight, target, reduction=reduction)
        for value, expected in zip(dask.compute(*lazily, scheduler="synchronous"), at_once):
            np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_loss", [-2.5, "rows"])
def test_a_gradient_from_above(grad_loss, dtype, default_engine):
    per_row = generator("above").standard_normal(31).astype(np.float32)
    settings = {"grad_loss": per_row, "reduction": "none"} if grad_loss == "rows" else {"grad_loss": grad_loss}
    problem = problem_of(Shape(31, 15, 8), dtype, **settings)
    default_engine.assert_solved(problem, dask.compute(*cut(problem, (10, 21)), scheduler="synchronous"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output_mask", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_asked_for(output_mask, dtype):
    problem = problem_of(Shape(31, 15, 8), dtype)
    both = cut(problem, (10, 21))
    for settings in ({"output_mask": output_mask}, {"output_mask": output_mask, "return_grad": False}):
        wanted = output_mask if len(settings) == 1 else (False, False)
        result = cut(problem.replaced(**settings), (10, 21))
        assert [each is not None for each in result[1:]] == list(wanted)
        for value, expected in zip(result, both):
            if value is not None:
                np.testing.assert_allclose(
                    *dask.compute(value, expected, scheduler="synchronous"), rtol=1e-5, atol=1e-6
                )


def test_ids_that_begin_elsewhere_and_another_one_that_is_ignored(default_engine):
    problem = problem_of(Shape(31, 15, 8), "bfloat16", vocab_start_index=100, ignore_index=104)
    target = problem.arguments["target"]
    target[target == -100] = 4
    target += 100
    default_engine.assert_solved(problem, dask.compute(*cut(problem, (10, 21)), scheduler="synchronous"))


def test_a_weight_that_is_a_dask_array():
    problem = problem_of(Shape(31, 15, 8), "float32")
    expected = dask.compute(*cut(problem, (10, 21)))
    weight = da.from_array(problem.arguments["weight"], chunks=-1)
    for value, right in zip(dask.compute(*cut(problem.replaced(weight=weight), (10, 21))), expected):
        assert_identical(value, right)


@given(st.data())
def test_vectors_in_other_chunks_are_cut_as_the_input(data):
    problem = problem_of(Shape(31, 15, 8), "float32", reduction="none", grad_loss=np.arange(31.0))
    tokens = data.draw(cuts(31))
    expected = cut(problem, tokens)
    arguments = problem.arguments | {"input": da.from_array(problem.arguments["input"], chunks=(tokens, -1))}
    for name in ("target", "grad_loss"):
        arguments[name] = da.from_array(arguments[name], chunks=(data.draw(cuts(31)),))
    result = agd.linear_cross_entropy(**arguments)
    assert [each.chunks for each in result] == [each.chunks for each in expected]
    values, right = (dask.compute(*each, scheduler="synchronous") for each in (result, expected))
    for value, each in zip(values, right):
        assert_identical(value, each)


@pytest.mark.parametrize("tokens", [(0,), (0, 0)])
@pytest.mark.parametrize("of_target", [(0,), (0, 0), (0, 0, 0)])
def test_no_tokens_in_other_chunks(tokens, of_target):
    x, target = da.zeros((0, 3), chunks=(tokens, 3)), da.zeros(0, dtype=int, chunks=(of_target,))
    result = agd.linear_cross_entropy(x, np.ones((2, 3)), target, reduction="sum")
    loss, input_grad, weight_grad = dask.compute(*result, scheduler="synchronous")
    assert loss == 0
    assert input_grad.shape == (0, 3)
    assert not weight_grad.any()


def test_other_chunks_beside_a_client_are_cut_for_any_scheduler(request):
    """While a client exists, dask cuts arrays by tasks that only the client's workers can compute."""
    with request.getfixturevalue("_client").as_current():
        x, target = da.zeros((6, 3), chunks=(2, 3)), da.zeros(6, dtype=int, chunks=3)
        result = agd.linear_cross_entropy(x, np.ones((2, 3)), target)
        assert result.loss.compute(scheduler="synchronous") == pytest.approx(np.log(2))


def test_vectors_of_numpys_are_cut_as_the_input():
    problem = problem_of(Shape(31, 15, 8), "float32", reduction="none", grad_loss=np.arange(31.0))
    arguments = problem.arguments | {"input": da.from_array(problem.arguments["input"], chunks=(10, -1))}
    expected = dask.compute(*cut(problem, (10, 10, 10, 1)))
    for value, right in zip(dask.compute(*agd.linear_cross_entropy(**arguments)), expected):
        assert_identical(value, right)


def test_equal_calls_are_the_same_tasks():
    problem = problem_of(Shape(31, 15, 8), "float32")
    first, second = (cut(problem, (10, 21)) for _ in range(2))
    assert [each.name for each in first] == [each.name for each in second]


def test_settings_reach_the_chunks(monkeypatch):
    seen = []
    original = tasks.run

    def run(operator, values, out, backend, num_threads):
        given = dict(zip(operator.parameters, values))
        seen.append(given | {"backend": backend, "num_threads": num_threads})
        return original(operator, values, out, backend, num_threads)

    monkeypatch.setattr(tasks, "run", run)
    settings = {"workspace_bytes": 4 << 20, "filter_eps": 1e-9, "num_threads": 2}
    with ag.use_backend("reference"):
        result = cut(problem_of(Shape(31, 15, 8), "float32", **settings), (10, 21))
    dask.compute(*result, scheduler="threads")
    for each in seen:
        assert {name: each[name] for name in settings} == settings
        assert each["backend"] == "reference"
    assert len(seen) == 2


# ---- options ---------------------------------------------------------------------------------------------------------

OF_TOKENS = ("input", "target", "target_prob", "grad_loss", "token_weight", "temperature")


def cut_all(arguments: dict, tokens: tuple[int, ...]) -> dict:
    """Return the arguments of a call, with dask arrays instead of the arrays that have a row for each token."""
    cut = {name: arguments[name] for name in OF_TOKENS if np.ndim(arguments.get(name))}
    return arguments | {name: da.from_array(a, chunks=(tokens, *a.shape[1:])) for name, a in cut.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_over_chunks(option, dtype):
    arguments = arguments_of(Shape(31, 40, 16), dtype, option)
    result = agd.linear_cross_entropy(**cut_all(arguments, (9, 21, 1)))
    whole = ag.linear_cross_entropy(**arguments)
    assert result._fields == whole._fields
    values = whole._replace(**dict(zip(whole._fields, dask.compute(*result, scheduler="synchronous"), strict=True)))
    for lazy, value, right in zip(result, values, whole, strict=True):
        assert (lazy.shape, lazy.dtype) == (right.shape, right.dtype) == (value.shape, value.dtype)
    check(values, arguments, dtype)


@given(st.sampled_from(tuple(OPTIONS)), st.sampled_from(["mean", "sum", "none"]), st.data())
def test_options_over_any_chunks(option, reduction, data):
    arguments = arguments_of(Shape(31, 40, 16), "float64", option, reduction)
    result = agd.linear_cross_entropy(**cut_all(arguments, data.draw(cuts(31))))
    values = dask.compute(*result, scheduler="synchronous")
    for name, value, right in zip(result._fields, values, ag.linear_cross_entropy(**arguments), strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_options_give_the_same_bits_on_every_scheduler(dtype, compute):
    result = agd.linear_cross_entropy(**cut_all(arguments_of(Shape(31, 40, 16), dtype, "all"), (9, 21, 1)))
    for value, expected in zip(compute(*result), dask.compute(*result, scheduler="synchronous"), strict=True):
        assert_identical(value, expected)


def test_arrays_of_the_vocabulary_in_chunks():
    arguments = arguments_of(Shape(31, 40, 16), "float32", "all")
    cut = cut_all(arguments, (9, 22))
    expected = dask.compute(*agd.linear_cross_entropy(**cut), scheduler="synchronous")
    cut |= {name: da.from_array(arguments[name], chunks=7) for name in ("bias", "class_weight")}
    for value, right in zip(dask.compute(*agd.linear_cross_entropy(**cut), scheduler="synchronous"), expected):
        assert_identical(value, right)


@pytest.mark.parametrize(
    "options",
    [
        {"token_weight": np.zeros(4)},
        {"token_weight": np.array([1, 0, -1, 5.0])},
        # The sum of the weights is -1 for the loss, and 0 for the squared lse.
        {"token_weight": np.array([1, 0, -1, 5.0]), "class_weight": np.array([1, 2.0]), "lse_square_scale": 0.1},
    ],
)
def test_means_over_weights_of_sum_0(options):
    """A mean over weights of sum 0 is NaN without a gradient, as if the squared lse's weights alone have this sum."""
    x, weight, target = np.ones((4, 2)), np.ones((2, 2)), np.array([0, 1, 1, -100])
    for value in (ag.linear_cross_entropy, agd.linear_cross_entropy):
        rows = x if value is ag.linear_cross_entropy else da.from_array(x, chunks=(2, 2))
        loss, input_grad, weight_grad = dask.compute(*value(rows, weight, target, **options), scheduler="synchronous")
        assert np.isnan(loss)
        assert not input_grad.any()
        assert not weight_grad.any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_nearly_certain_target_keeps_its_digits(dtype):
    """A target of probability 1 - 1e-11 has a loss, over chunks as in one call."""
    weight = np.zeros((2, 1), DTYPES[dtype])
    weight[0] = 25
    x = np.ones((4, 1), DTYPES[dtype])
    result = agd.linear_cross_entropy(da.from_array(x, chunks=(2, 1)), weight, np.zeros(4, int))
    np.testing.assert_allclose(result.loss.compute(scheduler="synchronous"), np.exp(-25), rtol=1e-4)


def test_gradients_of_a_bias_are_added_up_in_float64():
    """Gradients of 1 and 2**-30 for each of 64 chunks add up without an error before the sum is rounded."""
    tokens = np.tile([1.0, 2.0**-30], 64)
    x, weight = np.zeros((128, 1), np.float32), np.zeros((2, 1), np.float32)
    result = agd.linear_cross_entropy(
        da.from_array(x, chunks=(1, 1)),
        weight,
        np.zeros(128, int),
        reduction="sum",
        token_weight=tokens,
        bias=np.zeros(2, np.float32),
    )
    expected = np.float32(32 + 32 * 2.0**-30)
    assert_identical(result.bias_grad.compute(scheduler="synchronous"), np.array([-expected, expected]))


def test_a_bad_target_is_named_though_classes_have_weights():
    result = agd.linear_cross_entropy(
        da.ones((4, 2), chunks=(2, 2)), np.ones((3, 2)), np.array([0, 1, 2, 9]), class_weight=np.ones(3)
    )
    with pytest.raises(ag.ParamInvalidError, match="target: expected values in"):
        dask.compute(*result, scheduler="synchronous")


# ---- top k -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["none", "temperature", "all"])
def test_top_k_over_chunks(options, dtype, compute):
    arguments = dict(sample_of(TOP_K, Shape(31, 40, 16), dtype, k=5, temperature=0.7).arguments)
    if options == "none":
        arguments["temperature"] = 1.0
    elif options == "all":
        random = generator("options of top k", dtype)
        arguments |= {"temperature": random.uniform(0.5, 2, 31), "bias": random.standard_normal(40)}
        arguments |= {"logit_scale": 1.5, "softcap": 20.0}
    whole = ag.linear_top_k(**arguments)
    x = da.from_array(arguments.pop("input"), chunks=((9, 21, 1), 16))
    if options == "all":
        arguments["temperature"] = da.from_array(arguments["temperature"], chunks=7)
    result = agd.linear_top_k(x, **arguments)
    assert [each.chunks for each in result] == [((9, 21, 1), (5,))] * 2
    for lazy, value, right in zip(result, compute(*result), whole, strict=True):
        assert (lazy.shape, lazy.dtype) == (value.shape, value.dtype)
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


def test_settings_of_top_k_reach_the_chunks(monkeypatch):
    seen = []
    original = ag.linear_top_k
    monkeypatch.setattr(ag, "linear_top_k", lambda *args, **kw: seen.append(kw) or original(*args, **kw))
    with ag.use_backend("reference"):
        result = agd.linear_top_k(
            da.ones((4, 2), chunks=2).rechunk({1: -1}), np.ones((5, 2)), 2, temperature=0.5, workspace_bytes=4 << 20
        )
    dask.compute(*result, scheduler="threads")
    settings = {"k": 2, "temperature": 0.5, "bias": None, "logit_scale": 1.0, "softcap": None}
    settings |= {"workspace_bytes": 4 << 20, "backend": "reference", "num_threads": 1}
    assert seen == [settings] * 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_of_all_classes(reduction):
    random = generator("dask", "dense")
    arguments = {
        "input": random.standard_normal((11, 4)),
        "weight": random.standard_normal((6, 4)),
        "reduction": reduction,
    }
    target, token_weight = random.random((11, 6)), random.random(11)
    options = {"label_smoothing": 0.2, "outputs": ("lse",)}
    right = ag.linear_cross_entropy(**arguments, target=target, token_weight=token_weight, **options)
    arguments["input"] = da.from_array(arguments["input"], chunks=(3, -1))
    for lazy in (target, da.from_array(target, chunks=(2, 5))):
        result = agd.linear_cross_entropy(**arguments, target=lazy, token_weight=token_weight, **options)
        for value, wanted in zip(dask.compute(*result, scheduler="synchronous"), right, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-15)
