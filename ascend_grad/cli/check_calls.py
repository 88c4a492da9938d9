"""Calls of ``ascend-grad check``: on each device in turn, on tensors of torch_npu, and repeated to compare bits."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._dtypes import BFLOAT16
from ..backends.ascend import threads
from ..backends.ascend.backend import NAME as NPU
from ..errors import AscendGradError
from .check_cases import Case

#: Number of equal calls that have to give equal bits.
REPEATS = 10

#: Operators that the vendor promises to be deterministic only if the option is set.
VARYING = ("scaled_masked_softmax_backward",)

Call = Callable[[], tuple[NDArray | None, ...]]


def import_torch_npu() -> str:
    """Import torch_npu if it is installed, before the device is opened. Return why that failed, "" if it did not."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # whatever it raises, the rest can be checked
            return f"torch_npu cannot be imported: {error!r}"
    return ""


class Caller:
    """Computes cases with a backend. If there are several devices, each case is computed on the next one."""

    def __init__(self, backend: str):
        self._backend = backend
        self._count = ag.npu.device_count() if backend == NPU else 0
        self._devices = cycle(range(self._count or 1))

    def ways(self, case: Case) -> Iterator[tuple[str, Call]]:
        """Yield the calls that compute a case, each with a suffix for its label ("" for a plain call)."""
        device = next(self._devices)
        where = f", device {device}" if self._count > 1 else ""
        yield where, lambda: self.compute(case, device)
        if self._count and "torch_npu" in sys.modules:
            yield f"{where}, tensors of torch_npu", lambda: self._compute_with_tensors(case, device)

    def compute(self, case: Case, device: int = 0) -> tuple[NDArray | None, ...]:
        with threads.device_chosen(device if self._count else None):
            return as_tuple(getattr(ag, case.operator)(**case.arguments, backend=self._backend))

    def _compute_with_tensors(self, case: Case, device: int) -> tuple[NDArray | None, ...]:
        arguments = {
            name: _tensor(value, device) if isinstance(value, np.ndarray) else value
            for name, value in case.arguments.items()
        }
        results = as_tuple(getattr(ag, case.operator)(**arguments, backend=self._backend))
        return tuple(None if result is None else _array(result) for result in results)

    def repeat(self, case: Case) -> tuple[str, str]:
        """Compare the bits of equal calls. Return a failure and a note, each "" if there is none."""
        if self._count and case.operator in VARYING:
            note = "" if self._is_repeatable(case) else "bits vary from call to call without npu.use_deterministic()"
            try:
                with ag.npu.use_deterministic():
                    failure = "" if self._is_repeatable(case) else "bits vary with npu.use_deterministic()"
            except AscendGradError as error:
                return "", "; ".join(filter(None, (note, str(error))))
            return failure, note
        return "" if self._is_repeatable(case) else f"bits vary among {REPEATS} equal calls", ""

    def _is_repeatable(self, case: Case) -> bool:
        first, *others = ([_bits(array) for array in self.compute(case)] for _ in range(REPEATS))
        return all(other == first for other in others)


def as_tuple(results: Any) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def _bits(array: NDArray | None) -> bytes:
    return b"" if array is None else array.tobytes()


def _tensor(array: NDArray, device: int) -> Any:
    """Return a copy of an array as a torch tensor on a device."""
    torch: Any = sys.modules["torch"]
    copy = np.array(array, order="C")
    is_bfloat16 = copy.dtype == BFLOAT16
    tensor = torch.from_numpy(copy.view(np.int16) if is_bfloat16 else copy)
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).to(f"npu:{device}")


def _array(tensor: Any) -> NDArray:
    """Return a copy of a torch tensor as an array on the host."""
    torch: Any = sys.modules["torch"]
    copy = tensor.cpu()
    return copy.view(torch.int16).numpy().view(BFLOAT16) if copy.dtype == torch.bfloat16 else copy.numpy()
