import numpy as np
from numpy.typing import NDArray

from ._linear_rows import Rows

class Plan:
    nbytes: int
    workspace: int
    products: set[str]
    compensated: set[str]
    rows: int
    vocab: int
    hidden: int
    chunks: int
    blocks: int
    slices: int
    chunks_outside: bool
    by_slice: bool
    caches_logits: bool
    cached_blocks: int
    blocks_in_weight_grad: int
    packed_chunks: int

def plans(
    input: np.ndarray,
    weight: np.ndarray,
    rows: int,
    workspace: int,
    with_logits: bool,
    with_input_grad: bool,
    with_weight_grad: bool,
    buffers_weight_grad: bool,
    caches_logits: bool = False,
    weight_grad_bytes: int = 0,
) -> list[Plan]: ...
def default_workspace(
    input: np.ndarray, weight: np.ndarray, with_input_grad: bool, with_weight_grad: bool, beside: int = 0
) -> int: ...
def workspace_bound(plans: list[Plan], workspace: int) -> int: ...
def gradient(
    input: np.ndarray,
    weight: np.ndarray,
    rows: Rows,
    softmax: np.ndarray | None,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace: int,
    filter_eps: float,
    threads: int,
    aside: list[tuple[np.ndarray, np.ndarray]],
) -> None: ...
def copy_all(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None: ...
def statistics(
    input: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    start: int,
    end: int,
    with_logits: bool,
    threads: int,
) -> tuple: ...
def loss_and_gradients(
    input: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    start: int,
    ignored: int,
    reduction: str,
    grad_loss: NDArray[np.float64],
    loss: np.ndarray,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace: int,
    filter_eps: float,
    threads: int,
) -> None: ...
def probabilities(
    logits: np.ndarray, logits_max: np.ndarray, sum_exp: np.ndarray, out: np.ndarray, threads: int
) -> None: ...
def losses(sum_exp: np.ndarray, predicted: np.ndarray, loss: np.ndarray) -> None: ...
