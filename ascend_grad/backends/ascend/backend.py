"""The backend of the Ascend NPU, as the registry sees it.

Most machines have no such device. So what computes on one is imported by the first call that needs it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import _array_types
from ..._call import Call
from ..base import Unsupported
from . import runtime
from .libraries import FOLDER_VARIABLES
from .runtime import found

__all__ = [
    "ENVIRONMENT",
    "NAME",
    "found",
    "owns",
    "run",
    "status",
    "transferred_bytes",
    "unsupported_reason",
    "workspace_size",
]

NAME = "npu"

#: Variables of the environment by which the toolkit, its kernels and its devices are found.
ENVIRONMENT: tuple[str, ...] = (*FOLDER_VARIABLES, "ASCEND_OPP_PATH", "ASCEND_RT_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


def status() -> tuple[bool, str, str]:
    return runtime.status()


def owns(array: object) -> bool:
    from .array import DeviceArray

    return isinstance(array, DeviceArray)


def unsupported_reason(call: Call) -> Unsupported | None:
    from . import limits

    return limits.unsupported_reason(call, runtime.state())


def run(call: Call, threads: int) -> Any:
    from . import calls

    return calls.run(call)


def transferred_bytes(call: Call) -> int:
    # Values of float64 are rounded before they are sent, as the device computes in float32.
    arguments = sum(
        value.size * (4 if value.dtype.char == "d" else value.itemsize)
        for value in call.arguments.values()
        if isinstance(value, np.ndarray)
    )
    return arguments + sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in call.specs if spec is not None)


def workspace_size(call: Call) -> int:
    from . import calls

    return calls.workspace_size(call)


def _tensor_array(tensor: Any, name: str, operator: str | None) -> Any:
    from . import torch_npu

    return torch_npu.tensor_array(tensor, name, operator)


_array_types.DEVICE_TENSORS[NAME] = _tensor_array  # by torch's name of its devices
