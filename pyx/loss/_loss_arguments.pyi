from typing import Any

from numpy.typing import NDArray

def weight_sums(target: NDArray, **options: Any) -> NDArray: ...
