"""A measured call: the operator, its arrays, its options. The cases of all benchmarks have this one type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

NARROW_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*NARROW_DTYPES, "float64")
DTYPES_OF_16_BITS = NARROW_DTYPES[1:]

BACKWARD = ("softmax_backward", "log_softmax_backward")
FORWARD = ("softmax", "log_softmax")
MASKED_BACKWARD = "scaled_masked_softmax_backward"
MASKED = (MASKED_BACKWARD, "scaled_masked_softmax")
#: The loss of logits, a row-wise operator.
CROSS_ENTROPY = "cross_entropy"
ROWWISE = (*BACKWARD, *MASKED, *FORWARD, CROSS_ENTROPY)

GRADIENT = "fused_linear_cross_entropy_loss_grad"
MAX_SUM = "fused_linear_online_max_sum"
WHOLE = "linear_cross_entropy"
TOP_K = "linear_top_k"
JAX = "jax.linear_cross_entropy"
#: Products of the Hessian and a vector, of a linear layer and of logits.
HVP, ROWS_HVP = "linear_cross_entropy_hvp", "cross_entropy_hvp"
SECOND_ORDER = (HVP, ROWS_HVP)
#: The linear operators that rivals compute, with their modes: the source of the gradient's softmax, for example.
LINEAR_MODES = {GRADIENT: ("recomputed", "stored"), MAX_SUM: ("forward",), WHOLE: ("loss and gradients",)}
LINEAR = tuple(LINEAR_MODES)
#: The mode of a classifier's loss, whose input has no gradient.
WEIGHT_GRADIENT = "loss and weight gradient"
#: The mode of a loss of a sparse input, which the number of stored elements precedes.
SPARSE = "stored elements, loss and weight gradient"
#: The mode of products of the Hessian of a linear layer.
PRODUCT = "product"
#: The mode of a gradient of a trained model, whose small softmax entries are skipped.
FILTERED = "filtered"
#: Floating-point operations for each BT*V*H, by operator. A stored softmax saves two.
OPERATIONS = {GRADIENT: 6, MAX_SUM: 2, WHOLE: 6}
#: The other call of a linear case without rivals: the plain loss, the statistics, the loss of NumPy's arrays.
OTHER_CALLS = {WHOLE: "plain", TOP_K: "statistics", JAX: "arrays"}

#: Modes of row-wise cases: where the result goes, a single call after a pause, or forward and backward together.
OUT, FRESH, IN_PLACE, IDLE, AUTOGRAD = "out", "fresh", "in place", "idle", "autograd"

#: Options of the loss of logits, of which a case has at most one.
CLASS_WEIGHTS, SMOOTHING, IGNORED, SEVERAL_TARGETS = "class weights", "smoothing", "ignored rows", "8 targets"
#: Probabilities of all classes as targets.
DENSE = "dense targets"
LOGITS_OPTIONS = (CLASS_WEIGHTS, SMOOTHING, IGNORED, SEVERAL_TARGETS, DENSE)

#: Layouts of arrays in memory. Random problems draw them by number.
C_ORDER, FORTRAN_ORDER, TRANSPOSED, EVERY_SECOND = "C order", "Fortran order", "transposed", "every second"
NEGATIVE_STEPS, COLUMN, BROADCAST, BYTE_SWAPPED = "negative steps", "one column of five", "broadcast", "byte-swapped"
LAYOUTS = (
    *(C_ORDER, FORTRAN_ORDER, TRANSPOSED, EVERY_SECOND),
    *(NEGATIVE_STEPS, COLUMN, BROADCAST, BYTE_SWAPPED),
)

#: Strange layouts, which have numbers after these names: "steps of 3" along the last axis, "one column of 4", "axes in
#: order 2 0 1" of memory, "first with stride 0 along 1" for the first input alone, and the same for all inputs.
STEPS_OF, COLUMN_OF, AXES = "steps of", "one column of", "axes in order"
FIRST_STRIDE_0, ALL_STRIDE_0 = "first with stride 0 along", "all with stride 0 along"
WRITABLE_STRANGE = (STEPS_OF, COLUMN_OF, AXES)
STRANGE = (*WRITABLE_STRANGE, FIRST_STRIDE_0, ALL_STRIDE_0)

#: The kinds of comparisons: named cases, random problems, calls on PyTorch's tensors, calls in programs.
NAMED, RANDOM, TENSORS, PROGRAMS = "named", "random", "tensors", "programs"
#: What a program does before each call of this library.
BACK_TO_BACK, AFTER_NUMPY, AFTER_TORCH = "back to back", "after a NumPy product", "after a torch product"
AFTER_PYTHON, AFTER_PAUSE = "after Python work", "after 20 ms"
PLACES = (BACK_TO_BACK, AFTER_NUMPY, AFTER_TORCH, AFTER_PYTHON, AFTER_PAUSE)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def compute_dtype(name: str) -> np.dtype:
    """Return the type in which NumPy and BLAS compute a case; for 16-bit types that is float32, which is faster."""
    return np.dtype("float64" if name == "float64" else "float32")


def kind_of(layout: str) -> str:
    """Return the name of a layout without its numbers."""
    return layout.rstrip(" 0123456789")


def numbers_of(layout: str) -> tuple[int, ...]:
    """Return the numbers of a strange layout."""
    return tuple(map(int, layout.removeprefix(kind_of(layout)).split()))


def layout_text(shape: tuple[int, ...], dim: int | None = None) -> str:
    """Format shape and axis."""
    lengths = " × ".join(map(str, shape))
    return lengths if dim in (None, len(shape) - 1) else f"{lengths}, dim {dim}"


@dataclass(frozen=True)
class Case:
    """One measured call.

    Attributes
    ----------
    operator : str
        The public function.
    dtype : str
        The dtype of all arrays (masks are bool, targets int64); for linear operators of input and weight.
    shape : tuple of int
        The shape of all arrays; the second length of a mask is 1. For linear operators (BT, V, H).
    mode : str
        For row-wise operators `OUT`, `FRESH`, `IN_PLACE`, `IDLE` or `AUTOGRAD`; for linear operators one of their modes
        in `LINEAR_MODES`, `FILTERED`, or the options of a call that is compared with another call of this library;
        for losses over ranks what is split.
    dim : int, optional
        The axis of a row-wise operator, not negative. Linear operators have none.
    arrangement, out_arrangement : str
        Layouts of the inputs and of the array for the result, one of `LAYOUTS`, or of `STRANGE` with numbers; "" is C
        order.
    out_dtype : str
        The dtype of the result; "" is that of the inputs.
    options : str
        For `CROSS_ENTROPY`: one of `LOGITS_OPTIONS`, or "".
    variant : str
        The CPU variant that is forced, or "" for the best one.
    place : str
        What the program does before each call, one of `PLACES`, or "" for other suites.
    suite : {"named", "random", "tensors", "programs"}
        The kind of comparison, which decides the sides. It is not stored, as all cases of a file have the same one.
    """

    operator: str
    dtype: str
    shape: tuple[int, ...]
    mode: str
    dim: int | None = None
    arrangement: str = ""
    out_arrangement: str = ""
    out_dtype: str = ""
    options: str = ""
    variant: str = ""
    place: str = ""
    suite: str = field(default=NAMED, compare=False)

    @property
    def layout(self) -> str:
        return layout_text(self.shape, self.dim)

    @property
    def name(self) -> str:
        if not self.arrangement:
            words = [self.operator, self.dtype, self.layout, self.mode, self.place]
            if self.dim is None:
                words = [self.operator, self.mode, self.dtype, self.layout, self.variant, self.place]
            return " ".join(filter(None, words))
        operator = f"{self.operator} with {self.options}" if self.options else self.operator
        target = self.mode
        if self.mode == OUT:
            target = f"out {self.out_arrangement}{'' if self.out_dtype == self.dtype else f' {self.out_dtype}'}"
        return f"{operator} {self.dtype} {self.shape} dim {self.dim}, {self.arrangement}, {target}"

    @property
    def size(self) -> int:
        """Return the number of elements of a row-wise result."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of a row-wise result."""
        return self.size * numpy_dtype(self.out_dtype or self.dtype).itemsize

    @property
    def rows(self) -> int:
        """Return the number of rows of a row-wise operator."""
        assert self.dim is not None
        return max(1, self.size // max(1, self.shape[self.dim]))

    @property
    def operations(self) -> int:
        """Return the number of floating-point operations of a linear operator's formula."""
        return (4 if self.mode in ("stored", WEIGHT_GRADIENT) else OPERATIONS[self.operator]) * math.prod(self.shape)

    @property
    def is_sparse(self) -> bool:
        """Return whether the input of a linear case is sparse."""
        return self.mode.endswith(SPARSE)

    @property
    def stored_elements(self) -> int:
        """Return the number of elements that a sparse input is made of."""
        return int(self.mode.split()[0])

    @property
    def has_rivals(self) -> bool:
        """Return whether a linear case is compared with rivals, and not with another call of this library."""
        modes = *LINEAR_MODES.get(self.operator, ()), WEIGHT_GRADIENT, FILTERED, PRODUCT
        return self.mode in modes or self.is_sparse

    @property
    def other(self) -> str:
        """Return the name of the call that a linear case without rivals is compared with."""
        return OTHER_CALLS[self.operator]

    def stored(self) -> dict[str, Any]:
        """Return the fields that files of results have, in their order."""
        names = ["operator", "dtype", "shape", "dim", "mode"]
        if self.arrangement:
            names += ["arrangement", "out_arrangement", "out_dtype", "options"]
        if self.dim is None:
            names = ["operator", "mode", "dtype", "shape", *(["variant"] if self.has_rivals else [])]
        names += ["place"] if self.place else []
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Case:
        """Return the case with fields from a file of results."""
        return cls(**fields | {"shape": tuple(fields["shape"])})
