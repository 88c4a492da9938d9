"""The call that a command line of ``ascend-grad apply`` asks for, for files of any format."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._call import Call, Operator
from .._version import __version__
from ..inspection import bound_call
from ..operators import table
from .errors import naming_inputs
from .npy_files import check_raw_dtype

if TYPE_CHECKING:
    from tqdm import tqdm


#: The arguments that have integers or truth values.
_NOT_FLOATING = {"mask", "target", "target_mask", "masked_target"}


@dataclass(frozen=True)
class Job:
    """One call, whose arrays are named by paths."""

    operator: Operator
    #: The path of each argument, and of each requested result, by name.
    sources: dict[str, str]
    results: dict[str, str]
    #: The arguments that are no arrays.
    settings: dict[str, Any]
    backend: str | None
    num_threads: int | None
    out_dtype: np.dtype | None
    #: The dtype of elements of two raw bytes, or of integers of two bytes in place of floating-point numbers.
    raw_dtype: np.dtype | None
    #: Makes a progress bar.
    bar: Callable[..., tqdm]

    def validated(self, arrays: dict[str, NDArray]) -> tuple[Call, str]:
        """Validate a call on such arrays, and return it with the backend that all its parts use."""
        execution = {"backend": self.backend, "num_threads": self.num_threads}
        with naming_inputs(self.operator.name, self.sources):
            call, _, choice = bound_call(self.operator.name, (), arrays | self.settings | execution)
        return call, choice.backend

    def raw_dtype_of(self, name: str) -> np.dtype | None:
        """Return what elements of two raw bytes of an argument mean."""
        return None if name in _NOT_FLOATING else self.raw_dtype

    def check_raw_dtype(self, dtypes: dict[str, np.dtype]) -> None:
        """Raise an error unless the dtypes of the arguments, by their names, agree with `raw_dtype`."""
        floating = {self.sources[name]: dtype for name, dtype in dtypes.items() if name not in _NOT_FLOATING}
        check_raw_dtype(self.raw_dtype, floating)

    def function(self, backend: str) -> Callable[..., Any]:
        """Return the operator with all arguments but its arrays."""
        return partial(getattr(ag, self.operator.name), **self.settings, backend=backend, num_threads=self.num_threads)

    def reduced_axis(self, call: Call) -> int:
        """Return the axis along which a part of the result needs whole rows."""
        return call.arguments.get("axis", len(call.arrays[0].shape) - 1)

    def description(self) -> dict[str, Any]:
        """Return everything that decides on the result except the contents of the sources, as JSON takes it."""
        return {
            "version": __version__,
            "operator": self.operator.name,
            "inputs": {name: os.path.realpath(source) for name, source in self.sources.items()},
            **self.settings,
            "backend": self.backend,
            "out-dtype": None if self.out_dtype is None else str(self.out_dtype),
            "dtype": None if self.raw_dtype is None else str(self.raw_dtype),
        }


def takes_out(operator: Operator) -> bool:
    """Return whether the operator has an argument `out` for all of its results."""
    return operator is not table.CROSS_ENTROPY and "out" in inspect.signature(getattr(ag, operator.name)).parameters


def fit(shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the part of an array that belongs to a box; where a mask has length 1, it serves all boxes."""
    return tuple(slice(0, 1) if length == 1 else part for length, part in zip(shape, box))
