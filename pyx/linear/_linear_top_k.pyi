from typing import Any

from numpy.typing import NDArray

def top_k(
    input: NDArray,
    weight: NDArray,
    k: int,
    options: dict[str, Any],
    log_prob: NDArray,
    indices: NDArray,
    num_threads: int,
) -> None: ...
def top_k_bound(input: NDArray, weight: NDArray, k: int, options: dict[str, Any]) -> int: ...
def chosen_for_top_k(
    input: NDArray, weight: NDArray, k: int, options: dict[str, Any], num_threads: int
) -> tuple[str, int]: ...
