from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Chunk = tuple[
    NDArray[np.int64], NDArray[np.int64], np.ndarray | None, np.ndarray | None, np.ndarray | None
]  # row_numbers, target, grad, max, sum

class Rows(Protocol):
    count: int
    @property
    def absent(self) -> NDArray[np.int64]: ...
    def chunks(self, size: int) -> Iterator[Chunk]: ...

def workspace_bound(
    input: np.ndarray,
    rows: int,
    vocab: int,
    hidden: int,
    workspace: int,
    with_logits: bool,
    with_input_grad: bool,
    with_weight_grad: bool,
    with_max_sum: bool,
    buffered: bool,
) -> int: ...
def gradient(
    input: np.ndarray,
    weight: np.ndarray,
    rows: Rows,
    softmax: np.ndarray | None,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace: int,
    filter_eps: float,
    num_threads: int | None,
) -> None: ...
def max_sum(
    input: np.ndarray,
    weight: np.ndarray,
    rows: Rows,
    logits_max: np.ndarray,
    sum_exp: np.ndarray,
    predicted: np.ndarray,
    logits: np.ndarray | None,
    workspace: int,
    num_threads: int | None,
) -> None: ...
def probabilities(
    logits: np.ndarray,
    logits_max: NDArray[np.float64],
    sum_exp: NDArray[np.float64],
    out: np.ndarray,
    num_threads: int | None,
) -> None: ...
