from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

def handler(function: Callable[[dict[str, NDArray], dict[str, Any]], dict[str, NDArray]]) -> object: ...
