"""Calls of ``ascend-grad check``: on every device, with tensors of torch_npu, and repeated to compare bits."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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

Results = tuple[NDArray | None, ...]


def import_torch_npu() -> str:
    """Import torch_npu if it is installed, before the device is opened. Return why that failed, "" if it did not."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # whatever it raises, the rest can be checked
            return f"torch_npu cannot be imported: {error!r}"
    return ""


class Way(NamedTuple):
    """One way to compute every case: a device, with arrays of the host or with tensors on that device."""

    #: Suffix for the label of a case, "" if there is one way only.
    suffix: str
    compute: Callable[[Case], Results]
    #: Raises the error of a case that this way does not take, without computing it.
    explain: Callable[[Case], Any]


class Caller:
    """Computes cases with a backend.

    ``ways`` lists how: on every device, and on each of them also with tensors if torch_npu is imported.
    """

    def __init__(self, backend: str):
        self._backend = backend
        count = ag.npu.device_count() if backend == NPU else 0
        self._on_device = count > 0
        self.ways: list[Way] = []
        for device in range(count or 1):
            where = f", device {device}" if count > 1 else ""
            self.ways.append(Way(where, partial(self._compute, device=device if count else None), self._explain))
            if count and "torch_npu" in sys.modules:
                tensors = partial(self._compute_with_tensors, device=device)
                explain = partial(self._explain_with_tensors, device=device)
                self.ways.append(Way(f"{where}, tensors of torch_npu", tensors, explain))

    def _compute(self, case: Case, device: int | None) -> Results:
        with threads.device_chosen(device):
            return as_tuple(getattr(ag, case.operator)(**case.arguments, backend=self._backend))

    def _explain(self, case: Case) -> Any:
        return ag.explain(case.operator, **case.arguments, backend=self._backend)

    def _explain_with_tensors(self, case: Case, device: int) -> Any:
        return ag.explain(case.operator, **_with_tensors(case, device), backend=self._backend)

    def _compute_with_tensors(self, case: Case, device: int) -> Results:
        results = as_tuple(getattr(ag, case.operator)(**_with_tensors(case, device), backend=self._backend))
        return tuple(None if result is None else _array(result) for result in results)

    def repeat(self, case: Case, way: Way) -> tuple[str, str]:
        """Compare the bits of equal calls. Return a failure and a note, each "" if there is none."""
        if self._on_device and case.operator in VARYING:
            varies = "bits of results differ between equal calls without npu.use_deterministic()"
            note = "" if _is_repeatable(case, way) else varies
            try:
                with ag.npu.use_deterministic():
                    failure = (
                        ""
                        if _is_repeatable(case, way)
                        else "bits of results differ between equal calls with npu.use_deterministic()"
                    )
            except AscendGradError as error:
                return "", "; ".join(filter(None, (note, str(error))))
            return failure, note
        return "" if _is_repeatable(case, way) else f"bits of results differ among {REPEATS} equal calls", ""


def _is_repeatable(case: Case, way: Way) -> bool:
    first, *others = ([_bits(array) for array in way.compute(case)] for _ in range(REPEATS))
    return all(other == first for other in others)


def as_tuple(results: Any) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def _bits(array: NDArray | None) -> bytes:
    return b"" if array is None else array.tobytes()


def _with_tensors(case: Case, device: int) -> dict[str, Any]:
    """Return the arguments of a case with tensors on a device instead of arrays."""
    return {
        name: _tensor(value, device) if isinstance(value, np.ndarray) else value
        for name, value in case.arguments.items()
    }


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
