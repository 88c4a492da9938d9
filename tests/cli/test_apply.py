"""Test that ``ascend-grad apply`` writes files with the bits that one call on the input files gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from files import apply, assert_same_file, save, values
from hypothesis import given
from hypothesis import strategies as st
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED, generator

import ascend_grad as ag
from ascend_grad.cli import boxes
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def small_boxes(monkeypatch) -> None:
    monkeypatch.setattr(boxes, "BOX_ELEMENTS", 20)
    monkeypatch.setattr(boxes, "RUN_ELEMENTS", 3)


@pytest.mark.parametrize("name", ["y8", "y8.bin", "y.npy.old", "directory.d/y"])
def test_the_result_has_the_very_name_that_was_asked_for(name, here):
    """The result's file has the requested name. No suffix is added to it, as `numpy.save` would add one."""
    Path("directory.d").mkdir()
    values = np.ones((2, 3))
    before = {path for path in here.rglob("*") if path.is_file()}
    assert main(["apply", "softmax", *save(input=values), "-o", name]) == 0
    assert {path for path in here.rglob("*") if path.is_file()} - before == {here / "input.npy", here / name}
    assert_same_file(ag.softmax(values), name)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ARRAYS)
def test_every_operator_gives_the_bits_of_one_call(operator, dtype):
    arguments = values(operator, (3, 2, 5, 7), DTYPES[dtype])
    apply(operator, *save(**arguments), raw=dtype == "bfloat16")
    assert_same_file(getattr(ag, operator)(**arguments))


def test_inputs_by_position():
    """Inputs may be named by position, before and after options, and by options beside that."""
    arguments = values("softmax_backward", (6, 11), np.float32)
    first, file, second, other = save(**arguments)
    for options in ((file, other), (file, "--axis", "0", other), (file, second, other), (first, file, second, other)):
        apply("softmax_backward", *options)
        assert_same_file(ag.softmax_backward(**arguments, dim=0 if "--axis" in options else -1))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("dim", range(-3, 3))
@pytest.mark.parametrize("order", ["CC", "FF", "CF", "FC"])
def test_any_axis_and_either_order(dim, order):
    arguments = values("softmax_backward", (6, 11, 9), np.float32)
    arguments = {name: np.asarray(array, order=o) for (name, array), o in zip(arguments.items(), order)}
    apply("softmax_backward", *save(**arguments), "--axis", str(dim))
    # The result is in the order of the first input. One call would return C order for any inputs.
    assert_same_file(np.asarray(ag.softmax_backward(**arguments, dim=dim), order=order[0]))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("shape", [(), (1,), (50,), (0,), (0, 3), (3, 0), (1, 1, 1), (2,) * 8, (1, 40, 1)])
@pytest.mark.parametrize("operator", ["log_softmax_backward", "log_softmax"])
def test_any_shape(operator, shape):
    arguments = {name: np.asarray(array) for name, array in values(operator, shape, np.float32).items()}
    for dim in {0, len(shape) // 2 - (len(shape) > 0), -1}:
        apply(operator, *save(**arguments), "--dim", str(dim))
        assert_same_file(getattr(ag, operator)(**arguments, dim=dim))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("mask", [(4, 3), (4, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("operator", MASKED)
def test_masks_and_scale(operator, mask):
    arguments = values(operator, (4, 3, 2, 6), np.float64)
    arguments["mask"] = generator(mask).random((*mask, 2, 6)) < 0.5
    apply(operator, *save(**arguments), "--scale", "0.3")
    assert_same_file(getattr(ag, operator)(**arguments, scale=0.3))


@pytest.mark.parametrize("dtype", [*DTYPES, "swapped"])
def test_results_of_another_dtype(dtype):
    dtype = np.dtype(">f8") if dtype == "swapped" else DTYPES[dtype]
    arguments = values("softmax_backward", (5, 30), dtype)
    for out_dtype in DTYPES:
        apply("softmax_backward", *save(**arguments), "--out-dtype", out_dtype, raw=dtype == BFLOAT16)
        out = np.empty((5, 30), DTYPES[out_dtype])
        assert_same_file(ag.softmax_backward(**arguments, out=out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_byte_order(dtype):
    native = values("softmax", (4, 9), DTYPES[dtype])["input"]
    apply("softmax", *save(input=native.astype(native.dtype.newbyteorder(">"))), raw=dtype == "bfloat16")
    assert_same_file(ag.softmax(native))


def test_bfloat16_results_can_be_read_again():
    apply("softmax", *save(input=np.ones((2, 4), BFLOAT16)), raw=True)
    assert np.array_equal(np.load("out.npy").view(BFLOAT16), np.full((2, 4), 0.25, BFLOAT16))
    Path("out.npy").rename("again.npy")
    apply("softmax", "--input", "again.npy", raw=True)
    assert_same_file(np.full((2, 4), 0.25, BFLOAT16))


@pytest.mark.parametrize("stored", ["<i2", ">i2", "<u2", ">u2"])
def test_bits_of_bfloat16_in_integers(stored):
    """The result is as of raw elements."""
    arguments = values("softmax_backward", (4, 9), BFLOAT16)
    bits = {name: array.view(np.uint16).astype(stored) for name, array in arguments.items()}
    apply("softmax_backward", *save(**bits), raw=True)
    assert_same_file(ag.softmax_backward(**arguments))


@pytest.mark.filterwarnings("error")
def test_a_header_that_python_2_wrote():
    """A file whose header Python 2 wrote is read without the warnings of NumPy and of Python's parser."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (3L,), }\n"
    Path("x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(24))
    apply("softmax", "--input", "x.npy")
    assert_same_file(np.full(3, 1 / 3))


def test_settings_are_passed_on(capsys):
    options = save(**values("softmax_backward", (5, 30), np.float32))
    apply("softmax_backward", *options, "--threads", "3", "--backend", "reference")
    assert "backend reference" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "shown"), [((), False), (("--progress",), True), (("--no-progress",), False)])
def test_progress_goes_to_stderr(options, shown, capsys):
    apply("softmax", *save(input=np.zeros((3, 3))), *options)
    out, err = capsys.readouterr()
    assert out.startswith("out.npy: float64 (3, 3)")
    assert ("softmax: 100%" in err) == shown
    assert bool(err) == shown


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_cross_entropy(dtype, axis):
    """Each row has a loss, with its gradient and all outputs, unless a mean is asked for."""
    rng = generator(dtype, axis)
    logits = rng.standard_normal((5, 7, 6)).astype(DTYPES[dtype])
    target = rng.integers(0, 5, np.delete(logits.shape, axis))
    target.flat[2] = 3 if axis else -100
    files = [path for path in save(logits=logits, target=target) if path.endswith(".npy")]
    outputs = ("lse", "log_prob", "entropy", "predicted", "correct")
    options = [text for name in ("input_grad", *outputs) for text in (f"--{name.replace('_', '-')}-out", f"{name}.npy")]
    apply("cross_entropy", *files, "--axis", str(axis), *options, raw=dtype == "bfloat16")
    expected = ag.cross_entropy(logits, target, axis, reduction="none", outputs=outputs)
    for name in ("input_grad", *outputs):
        assert_same_file(getattr(expected, name), f"{name}.npy")
    assert_same_file(expected.loss)


def test_options_of_cross_entropy():
    rng = generator()
    logits, target = rng.standard_normal((4, 9)), rng.integers(0, 9, 4)
    files = {"class_weight": rng.random(9), "token_weight": rng.random(4), "grad_lse": rng.random(4)}
    numbers = {"label_smoothing": 0.25, "lse_square_scale": 0.5, "temperature": 2.0, "denominator": 3.0}
    options = [text for name, value in numbers.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--ignore-index", str(target[1]), "--reduction", "mean", "--input-grad-out", "gradient.npy"]
    apply("cross_entropy", *save(input=logits, target=target, **files), *options)
    expected = ag.cross_entropy(logits, target, ignore_index=int(target[1]), **files, **numbers)
    assert_same_file(np.asarray(expected.loss))
    assert_same_file(expected.input_grad, "gradient.npy")


# ---- boxes -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), max_size=5)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, max(len(shape) - 1, 0)))),
    st.booleans(),
    st.integers(1, 200),
    st.integers(1, 20),
)
def test_boxes_cover_everything_once(shape_and_dim, fortran_order, elements, run):
    shape, dim = shape_and_dim
    covered = np.zeros(shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "BOX_ELEMENTS", elements)
        patch.setattr(boxes, "RUN_ELEMENTS", run)
        parts = list(boxes.boxes(shape, dim, fortran_order))
    for box in parts:
        covered[box] += 1
        if covered.size:
            assert covered[box].shape[dim : dim + 1] == shape[dim : dim + 1]
            assert covered[box].size <= max(elements, shape[dim] if shape else 1) * run
    assert (covered == 1).all()


def test_boxes_are_of_the_size_meant():
    parts = list(boxes.boxes((1000, 30, 4096), 2, False))
    assert [part.stop - part.start for part in parts[0]] == [8, 30, 4096]
    assert len(parts) == 125
    # Parts of long columns (dim 0) have the number of columns that efficient reading needs.
    assert [part.stop - part.start for part in next(boxes.boxes((10**6, 10**5), 0, False))] == [10**6, 2**13]
    assert [part.stop - part.start for part in next(boxes.boxes((10**6, 10**5), 0, True))] == [10**6, 1]
