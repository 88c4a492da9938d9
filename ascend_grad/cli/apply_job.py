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

if TYPE_CHECKING:
    from tqdm import tqdm


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
    #: The dtype of elements of two raw bytes.
    raw_dtype: np.dtype | None
    #: Makes a progress bar.
    bar: Callable[..., tqdm]

    def validated(self, arrays: dict[str, NDArray]) -> tuple[Call, str]:
        """Validate a call on such arrays, and return it with the backend that all its parts use."""
        execution = {"backend": self.backend, "num_threads": self.num_threads}
        call, _, choice = bound_call(self.operator.name, (), arrays | self.settings | execution)
        return call, choice.backend

    def function(self, backend: str) -> Callable[..., Any]:
        """Return the operator with all arguments but its arrays."""
        return partial(getattr(ag, self.operator.name), **self.settings, backend=backend, num_threads=self.num_threads)

    def reduced_axis(self, call: Call) -> int:
        """Return the axis along which a part of the result needs whole rows."""
        return call.arguments.get("dim", len(call.arrays[0].shape) - 1)

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
    """Return whether the operator has an argument `out`."""
    return "out" in inspect.signature(getattr(ag, operator.name)).parameters


def fit(shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the part of an array that belongs to a box; where a mask has length 1, it serves all boxes."""
    return tuple(slice(0, 1) if length == 1 else part for length, part in zip(shape, box))


def cut(array: NDArray, box: tuple[slice, ...]) -> NDArray:
    """Return the elements that belong to a box."""
    # The ellipsis makes the index of a rank-0 array return a view and not a scalar.
    index: tuple[Any, ...] = (..., *fit(array.shape, box))
    return array[index]
