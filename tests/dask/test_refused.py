"""Test which arguments `ascend_grad.dask` refuses before computing, and other functions' errors for dask's arrays."""

from __future__ import annotations

from collections.abc import Iterator

import dask.array as da
import numpy as np
import pytest
from samples import ARRAYS, MASKED, OPERATORS

import ascend_grad as ag
import ascend_grad.dask as agd


def of(operator: str, shape: tuple[int, ...] = (2, 2, 2, 2), chunks: object = -1) -> dict[str, da.Array]:
    return {name: da.zeros(shape, dtype=bool if name == "mask" else "f4", chunks=chunks) for name in ARRAYS[operator]}


def message(kind: type, function, *args, **kwargs) -> str:
    with pytest.raises(kind) as info:
        function(*args, **kwargs)
    return str(info.value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_several_chunks_along_the_axis(operator):
    for name in ARRAYS[operator]:
        arrays = of(operator)
        arrays[name] = arrays[name].rechunk({3: 1})
        text = message(ag.ParamInvalidError, getattr(agd, operator), **arrays)
        assert f"{operator}: {name}: expected one chunk along axis 3, got 2; pass {name}.rechunk({{3: -1}})" in text


@pytest.mark.parametrize("operator", OPERATORS)
def test_unknown_chunk_sizes(operator):
    x = da.zeros((4, 2, 2, 2), chunks=(2, -1, -1, -1))
    unknown = x[x[:, 0, 0, 0] > 0]
    for name in ARRAYS[operator]:
        text = message(ag.ParamInvalidError, getattr(agd, operator), **of(operator) | {name: unknown})
        assert (
            f"{name}: expected known chunk sizes, got shape (nan, 2, 2, 2); pass {name}.compute_chunk_sizes()" in text
        )
    assert agd.softmax(unknown.compute_chunk_sizes()).compute().shape == (0, 2, 2, 2)


def test_more_bytes_than_an_index_counts():
    x = da.zeros((2**40, 2**40), chunks=(2**20, -1), dtype="f4")
    text = message(ag.ParamInvalidError, agd.softmax, x)
    assert f"softmax: input: expected at most {2**63 - 1} bytes, got shape {x.shape} of dtype float32" in text
    with pytest.raises(ag.ParamNullptrError, match="output"):  # output is checked first
        agd.softmax_backward(x, None)


def bad_calls() -> Iterator[tuple[str, dict, dict]]:
    """Yield bad calls: the operator, the arrays that replace good ones, and the settings."""
    for operator, names in ARRAYS.items():
        for name in names:
            yield operator, {name: None}, {}
            dtype = "i4" if operator.endswith("backward") or name == "mask" else "c8"
            yield operator, {name: da.zeros((2, 2, 2, 2), dtype=dtype)}, {}
            if len(names) > 1:
                yield operator, {name: da.zeros((2, 2, 2, 3), dtype=bool if name == "mask" else "f4")}, {}
        settings = [{"scale": "1"}, {"fix_triu_mask": True}] if operator in MASKED else [{"axis": 4}, {"axis": 0.5}]
        yield from ((operator, {}, each) for each in (*settings, {"backend": "tpu"}, {"num_threads": 0}, {"other": 1}))


@pytest.mark.parametrize(("operator", "replaced", "settings"), list(bad_calls()))
def test_bad_calls_fail_as_those_on_numpys_arrays(operator, replaced, settings):
    """Bad calls raise the same exception as calls on NumPy's arrays, without computing."""
    arrays = of(operator) | replaced
    plain = {name: None if array is None else np.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    with pytest.raises((ag.AscendGradError, TypeError)) as expected:
        getattr(ag, operator)(**plain, **settings)
    with pytest.raises(expected.type) as info:
        getattr(agd, operator)(**arrays, **settings)
    assert str(info.value) == str(expected.value)


@pytest.mark.parametrize("value", [[1.0, 2.0], 1.0, "x", np.ma.zeros(2), da.ma.masked_array(da.zeros(2))])
def test_what_is_no_array_of_dask_or_numpy(value):
    text = message(ag.ParamTypeError, agd.softmax, value)
    assert text.startswith("softmax: input: expected ")


LINEAR = {"input": da.zeros((4, 2), chunks=2), "weight": np.zeros((3, 2)), "target": da.zeros(4, dtype=int, chunks=2)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": da.zeros((4, 2), chunks=1)}, "input: expected one chunk along axis 1"),
        ({"weight": da.zeros((3, 2), chunks=(1, 2))}, "weight: expected one chunk along axis 0"),
        ({"weight": da.zeros((3, 2), chunks=(3, 1))}, "weight: expected one chunk along axis 1"),
        ({"target": da.zeros(5, dtype=int, chunks=3)}, "target: expected shape (BT = 4), got (5,)"),
        ({"target": da.zeros((4, 1), dtype=int)}, "target: expected shape (4,), got (4, 1)"),
        ({"target": da.zeros(4, chunks=2)}, "target: expected an integer dtype"),
        ({"weight": np.zeros((3, 2), "f4")}, "weight: expected dtype float64 as input has"),
        ({"weight": np.zeros((3, 5))}, "weight: expected shape (V, H = 2), got (3, 5)"),
        ({"input": None}, "input: expected an array, got None"),
        ({"weight": None}, "weight: expected an array, got None"),
        ({"target": None}, "target: expected an array, got None"),
        ({"target": [0, 1, 2, 0]}, "target: expected an array of dask or NumPy, got list"),
        ({"target": da.zeros(4, dtype=int)[da.zeros(4) == 0]}, "target: expected known chunk sizes"),
        ({"reduction": "all"}, "reduction: expected 'mean', 'sum' or 'none'"),
        ({"grad_loss": da.zeros(())}, "grad_loss: expected a real number, as reduction is 'mean'"),
        ({"grad_loss": da.zeros(4, chunks=2)}, "grad_loss: expected a real number, as reduction is 'mean'"),
        ({"grad_loss": [1.0] * 4, "reduction": "none"}, "grad_loss: expected an array of dask or NumPy, got list"),
        ({"grad_loss": da.zeros(3), "reduction": "none"}, "grad_loss: expected shape (BT = 4), got (3,)"),
        ({"token_weight": da.ones(3)}, "token_weight: expected shape (BT = 4), got (3,)"),
        ({"class_weight": da.ones(4)}, "class_weight: expected shape (V = 3), got (4,)"),
        ({"class_weight": [1.0] * 3}, "class_weight: expected an array of dask or NumPy, got list"),
        ({"bias": np.ones(3, int)}, "bias: expected dtype"),
        ({"target_prob": da.ones((4, 2))}, "target: expected shape (BT = 4, K) with K > 0, got (4,)"),
        (
            {"target": da.zeros((4, 2), dtype=int), "target_prob": da.ones((4, 3))},
            "target_prob: expected shape (4, 2) as target has, got (4, 3)",
        ),
        ({"temperature": [1.0] * 4}, "temperature: expected an array of dask or NumPy, got list"),
        ({"temperature": da.ones(())}, "temperature: expected an array, got Array, which cannot be converted"),
        ({"temperature": 0}, "temperature: expected a positive finite number"),
        ({"softcap": -1.0}, "softcap: expected a positive finite number"),
        ({"outputs": ("loss",)}, "outputs: expected a tuple of names among"),
        ({"ignore_index": 0.5}, "ignore_index: expected an int"),
        ({"output_mask": 1}, "output_mask: expected two of True or False"),
        ({"workspace_bytes": 1}, "workspace_bytes: expected"),
        ({"num_threads": 0}, "num_threads: expected"),
        ({"backend": "tpu"}, "backend: expected one of"),
    ],
)
def test_linear_calls_that_are_refused(arguments, text):
    assert f"linear_cross_entropy: {text}" in message(
        ag.AscendGradError, agd.linear_cross_entropy, **LINEAR | arguments
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": da.zeros((4, 2), chunks=1)}, "input: expected one chunk along axis 1"),
        ({"weight": da.zeros((3, 2), chunks=(1, 2))}, "weight: expected one chunk along axis 0"),
        ({"weight": np.zeros((0, 2))}, "weight: expected"),
        ({"input": None}, "input: expected an array, got None"),
        ({"k": 4}, "k: expected at most 128, and at most V = 3"),
        ({"temperature": 0.0}, "temperature: expected a positive finite number"),
    ],
)
def test_calls_for_the_top_k_that_are_refused(arguments, text):
    good = {"input": LINEAR["input"], "weight": LINEAR["weight"], "k": 2}
    assert f"linear_top_k: {text}" in message(ag.AscendGradError, agd.linear_top_k, **good | arguments)


def test_a_temperature_is_checked_when_its_chunk_is_computed():
    result = agd.linear_cross_entropy(**LINEAR, temperature=da.from_array(np.array([1, 2, 0, 1.0]), chunks=2))
    text = message(ag.ParamInvalidError, result.loss.compute, scheduler="synchronous")
    assert "temperature: expected positive finite numbers, got 0.0 in row 0" in text


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_target_beyond_the_vocabulary_is_found_in_its_chunk(dtype, compute):
    target = da.from_array(np.array([0, -100, 1, 3]), chunks=2)
    result = agd.linear_cross_entropy(LINEAR["input"].astype(dtype), np.zeros((3, 2), dtype), target)
    text = message(ag.ParamInvalidError, compute, *result)
    assert "linear_cross_entropy: target: expected values in [0, 3) or -100, got 3 in row 1 (block (1,))" in text


def declared(array: da.Array, made: object) -> da.Array:
    """Return an array in which blocks with index 1 along the first axis are `made`, and not as dask expects."""

    def block(values, block_id=None):
        return made if block_id[0] == 1 else values

    return da.map_blocks(block, array, dtype=array.dtype, meta=array._meta)


#: An object in place of a block of shape (2, 3), the class of the error, and a part of its message.
BLOCKS = {
    "longer": (np.zeros((3, 3), np.float32), ag.ParamInvalidError, "got shape (3, 3) and dtype float32"),
    "shorter": (np.zeros((1, 3), np.float32), ag.ParamInvalidError, "got shape (1, 3) and dtype float32"),
    "wider": (np.zeros((2, 4), np.float32), ag.ParamInvalidError, "got shape (2, 4) and dtype float32"),
    "of another rank": (np.zeros(3, np.float32), ag.ParamInvalidError, "got shape (3,) and dtype float32"),
    "of another dtype": (np.zeros((2, 3)), ag.ParamTypeError, "got shape (2, 3) and dtype float64"),
    "of ints": (np.zeros((2, 3), np.int32), ag.ParamTypeError, "got shape (2, 3) and dtype int32"),
    "no array": ([[0.0] * 3] * 2, ag.ParamTypeError, "got builtins.list"),
    "a masked array": (np.ma.zeros((2, 3), np.float32), ag.ParamTypeError, "got numpy.ma.MaskedArray"),
}


@pytest.mark.parametrize(("made", "kind", "got"), BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("cut", [(2, 2), (1, 3), (4,)], ids=str)
def test_a_block_that_is_not_what_its_array_declares(made, kind, got, cut):
    """A block that differs from its declaration is refused, also if the array is rechunked before the operator."""
    other = da.zeros((4, 3), chunks=(cut, 3), dtype=np.float32)
    wrong = declared(da.zeros((4, 3), chunks=2, dtype=np.float32).rechunk((2, 3)), made)
    text = message(kind, agd.softmax_backward(other, wrong).compute, scheduler="synchronous")
    assert text.startswith("softmax_backward: output: expected ")
    assert "block (1, 0)" in text
    assert got in text
    assert "as the array declares" in text or "numpy.ndarray as" in text


def test_the_first_block_of_others_is_computed():
    x = declared(da.zeros((4, 3), chunks=(2, 3)), None)
    assert agd.softmax(x)[:2].compute(scheduler="synchronous").shape == (2, 3)


def test_a_block_of_another_byte_order_is_taken():
    x = declared(da.zeros((4, 3), chunks=(2, 3)), np.zeros((2, 3), ">f8"))
    np.testing.assert_array_equal(agd.softmax(x).compute(scheduler="synchronous"), np.full((4, 3), 1 / 3))


def test_a_number_is_a_block_of_rank_0():
    x = da.map_blocks(lambda block: np.float64(block), da.zeros(()), dtype=float, meta=np.empty(()))
    assert agd.softmax(x).compute(scheduler="synchronous") == 1


@pytest.mark.parametrize("name", ["input", "target", "grad_loss"])
@pytest.mark.parametrize("result", range(3))
def test_a_block_of_tokens_that_is_not_what_its_array_declares(name, result):
    arguments = {
        "input": da.zeros((4, 2), chunks=(2, 2)),
        "weight": np.zeros((3, 2)),
        "target": da.zeros(4, dtype=int, chunks=2),
        "grad_loss": da.zeros(4, chunks=2),
        "reduction": "none",
    }
    arguments[name] = declared(arguments[name], np.zeros((3, 2)[: arguments[name].ndim], arguments[name].dtype))
    lazily = agd.linear_cross_entropy(**arguments)[result]
    text = message(ag.ParamInvalidError, lazily.compute, scheduler="synchronous")
    index = "(1, 0)" if name == "input" else "(1,)"
    assert f"linear_cross_entropy: {name}: expected shape (2," in text
    assert f"of block {index}, as the array declares, got shape (3," in text


def test_a_weight_that_is_not_what_its_array_declares(compute):
    weight = da.zeros((3, 2), chunks=-1).map_blocks(lambda block: block[:2], dtype=float, meta=np.empty((0, 0)))
    result = agd.linear_cross_entropy(**LINEAR | {"weight": weight})
    text = message(ag.ParamInvalidError, compute, *result)
    assert (
        "weight: expected shape (3, 2) and dtype float64 of block (0, 0), as the array declares, got shape (2, 2)"
        in text
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_other_functions_point_here(operator):
    text = message(ag.ParamTypeError, getattr(ag, operator), **of(operator))
    assert "dask has not computed it yet; use ascend_grad.dask, or pass its compute()" in text


def test_the_other_functions_compute_no_number_of_dasks():
    def fail(block):
        raise AssertionError

    number = da.map_blocks(fail, da.zeros(()), dtype=float, meta=np.empty(()))
    x = np.zeros((1, 1, 1, 2))
    assert "scale: expected a real number" in message(
        ag.ParamTypeError, ag.scaled_masked_softmax, x, np.zeros(x.shape, bool), number
    )
    assert "axis: expected an int" in message(ag.ParamTypeError, ag.softmax, x, number.astype(int))
    assert "out: expected" in message(ag.ParamTypeError, ag.softmax, np.zeros(2), out=da.zeros(2))
    vector = np.zeros(4, int)
    text = message(
        ag.ParamTypeError, ag.linear_cross_entropy, np.zeros((4, 2)), np.zeros((3, 2)), vector, grad_loss=number
    )
    assert "grad_loss: expected" in text
