from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import AbstractDeviceArray

DEVICE_TENSORS: dict[str, Callable[..., AbstractDeviceArray]]

class ArrayType:
    library: str | None
    def view(self, value: object, name: str, operator: str | None) -> np.ndarray | None: ...
    def view_anywhere(self, value: object, name: str, operator: str | None) -> Any: ...

def array_type(value: object, name: str, operator: str | None) -> ArrayType | None: ...
def number(array: Any) -> Any: ...
