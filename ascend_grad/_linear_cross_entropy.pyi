import numpy as np
from numpy.typing import NDArray

class Rows:
    total: int
    count: int
    def __init__(
        self,
        target: np.ndarray,
        start: int,
        end: int,
        mask: np.ndarray | None = None,
        grad: np.ndarray | None = None,
        maximum: np.ndarray | None = None,
        sum: np.ndarray | None = None,
        ignored: int | None = None,
    ) -> None: ...

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
    threads: int,
) -> None: ...
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
    logits: np.ndarray, logits_max: NDArray[np.float64], sum_exp: NDArray[np.float64], out: np.ndarray, threads: int
) -> None: ...

# The short way: anything is taken, and None is the answer to what is not the common case.
def common_gradient(
    grad: object,
    input: object,
    weight: object,
    target_mask: object,
    masked_target: object,
    label_smoothing: object,
    logits_max: object,
    sum_exp_logits: object,
    softmax: object,
    output_mask: object,
    workspace_bytes: object,
    filter_eps: object,
    out: object,
    num_threads: object,
) -> tuple[np.ndarray, np.ndarray] | None: ...
def common_statistics(
    input: object,
    weight: object,
    target: object,
    vocab_start_index: object,
    vocab_end_index: object,
    return_logits: object,
    num_threads: object,
) -> tuple | None: ...
def common_loss_and_gradients(
    input: object,
    weight: object,
    target: object,
    reduction: object,
    ignore_index: object,
    grad_loss: object,
    vocab_start_index: object,
    return_grad: object,
    output_mask: object,
    workspace_bytes: object,
    filter_eps: object,
    num_threads: object,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None: ...
