"""Draw the arrays of random calls, in any layout. Some share memory, and some belong to other libraries."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from faults import Noted
from producers import READ_ONLY, TYPES, Exchanged, Newer, Old, Own, Plain
from samples import BFLOAT16, GUARD, Layout, laid_out

from ascend_grad import arguments


class Draw(random.Random):
    """Draw random choices, which are the same for the same seed on every machine."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability


class WithArray:
    """Offer ``__array__`` and no other way to convert the object to an array."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """Tell which properties a library's arrays can have. PyTorch warns of read-only memory."""

    swapped: bool = False
    negative: bool = True
    unaligned: bool = False
    read_only: bool = True


def random_layout(draw: Draw, rank: int, itemsize: int, form: Form) -> Layout:
    steps = (1, 1, 1, 2, 3, -1, -2) if form.negative else (1, 1, 1, 2, 3)
    shifts = (0, 0, 1, 2, 3, 4, 8, 13) if form.unaligned else (0, 0, itemsize, 3 * itemsize)
    axes = list(range(rank))
    draw.shuffle(axes)
    return Layout(
        tuple(axes), tuple(draw.choices(steps, k=rank)), draw.choice(shifts), form.swapped and draw.chance(0.2)
    )


def random_view(draw: Draw, array: np.ndarray, form: Form, *, repeats: bool) -> np.ndarray:
    """Return the values in a random layout. With `repeats`, some axes may repeat their first element with stride 0."""
    repeated = [axis for axis in range(array.ndim) if draw.chance(0.15)] if repeats and array.size else []
    core = array[tuple(slice(0, 1) if axis in repeated else slice(None) for axis in range(array.ndim))]
    layout = random_layout(draw, array.ndim, array.itemsize, form)
    view = laid_out(core, layout, readonly=form.read_only and draw.chance(0.3))
    if not repeated:
        return view
    strides = np.broadcast_to(view, array.shape).strides
    return np.lib.stride_tricks.as_strided(view, array.shape, strides, writeable=not form.read_only)


def sharing_memory(
    draw: Draw, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, form: Form
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an array of the values, an array for a result that may share its memory, and the buffer of both arrays.

    The two arrays often begin at the same address.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    reach = -(-max(array.nbytes, size) // 8) * 8
    memory = np.full(3 * reach + 64, GUARD, np.uint8)
    offset = reach if draw.chance(0.4) else draw.randrange(2 * reach + 1) // dtype.itemsize * dtype.itemsize
    if form.unaligned and draw.chance(0.2):
        offset += draw.choice((1, 2, 4))
    shared = np.ndarray(array.shape, array.dtype, memory, reach)
    shared[...] = array
    return shared, np.ndarray(shape, dtype, memory, offset), memory


# ---- libraries -------------------------------------------------------------------------------------------------------


def itself(array: Any) -> Any:
    return array


def in_library(make: Callable[..., Any]) -> Callable[[np.ndarray], Any]:
    """Return a function that makes an array of a producer, read-only or writable."""

    def give(array: np.ndarray) -> Any:
        return make(array) if array.flags.writeable else make(array, flags=READ_ONLY)

    return give


def content(value: Any) -> np.ndarray:
    return value.array


class Library(NamedTuple):
    """Describe a library of arrays. `owns` is the class of results. `takes_out` tells if `out` may be one of them."""

    name: str
    give: Callable[[np.ndarray], Any]
    owns: type
    array_of: Callable[[Any], np.ndarray]
    form: Form
    takes_out: bool = True


NUMPY = Library("numpy", itself, np.ndarray, itself, Form(swapped=True, unaligned=True))
DLPACK = (
    Library("Plain", in_library(Plain), np.ndarray, itself, Form()),
    Library("Old", Old, np.ndarray, itself, Form(), takes_out=False),
    Library("Own", in_library(Own), Own, content, Form()),
    Library("Exchanged", in_library(Exchanged), Exchanged, content, Form()),
    Library("Newer", in_library(Newer), Exchanged, content, Form()),
)


@functools.cache
def torch_library() -> Library:
    import torch

    def give(array: np.ndarray) -> Any:
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def array_of(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(BFLOAT16)
        return tensor.numpy()

    return Library("torch", give, torch.Tensor, array_of, Form(negative=False, read_only=False))


@functools.cache
def jax_library() -> Library:
    import jax

    def give(array: np.ndarray) -> Any:
        with jax.enable_x64(True):
            return jax.numpy.array(np.array(array))

    return Library("jax", give, jax.Array, np.asarray, Form(read_only=False), takes_out=False)


#: Functions that choose a library, by the names of the command line.
LIBRARIES: dict[str, Callable[[Draw], Library]] = {
    "numpy": lambda draw: NUMPY,
    "dlpack": lambda draw: draw.choice(DLPACK),
    "torch": lambda draw: torch_library(),
    "jax": lambda draw: jax_library(),
}


def given(library: Library, value: Any) -> Any:
    """Return an argument as an array of the library, if it is an ordinary array of a dtype that DLPack has."""
    convertible = type(value) is np.ndarray and value.dtype in TYPES and value.dtype.isnative
    return library.give(value) if library is not NUMPY and convertible and value.dtype != np.uint16 else value


def disguised(draw: Draw, array: np.ndarray) -> Any:
    """Return the values as another object that NumPy converts to an array of the same dtype and shape."""
    forms: list[Callable[[np.ndarray], Any]] = [WithArray, lambda x: x.view(Noted)]
    if array.dtype.kind in "biuf":  # bfloat16 has no buffer format
        forms.append(memoryview)
    if array.dtype in (np.float64, np.int64, np.bool_) and 0 < array.size < 1000 and array.dtype.isnative:
        forms.append(np.ndarray.tolist)
    return draw.choice(forms)(array)


# ---- reports ---------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Return the description of an argument in a report."""
    if isinstance(value, (tuple, list)) and any(hasattr(each, "dtype") or hasattr(each, "array") for each in value):
        return f"{type(value).__name__} of {', '.join(map(shown, value))}"
    array = getattr(value, "array", value)
    if not isinstance(array, np.ndarray):
        return arguments.shown(value)
    with np.printoptions(threshold=12, edgeitems=3, linewidth=10**6):
        values = " ".join(str(np.asarray(array)).split())
    return (
        f"{type(value).__name__} {array.dtype.byteorder}{array.dtype}{array.shape} strides {array.strides} "
        f"address % 64 = {array.ctypes.data % 64}{'' if array.flags.writeable else ' read-only'}: {values}"
    )
