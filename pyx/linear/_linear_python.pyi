from typing import Any, NamedTuple

import numpy as np

from ._call import Call

class PlanDescription(NamedTuple):
    name: str
    nbytes: int
    rows: int
    vocab: int
    chunks: int
    blocks: int
    chunks_outside: bool
    caches_logits: bool
    cached_blocks: int
    blocks_in_weight_grad: int
    packed_chunks: int
    tasks: int
    products: frozenset[str]
    compensated: frozenset[str]

def gradient(
    grad: np.ndarray,
    input: np.ndarray,
    weight: np.ndarray,
    mask: np.ndarray,
    target: np.ndarray,
    logits_max: np.ndarray | None,
    sum_exp: np.ndarray | None,
    softmax: np.ndarray | None,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace_bytes: int,
    filter_eps: float,
    num_threads: int,
) -> None: ...
def gradient_bound(
    input: np.ndarray,
    weight: np.ndarray,
    softmax: np.ndarray | None,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace_bytes: int,
) -> int: ...
def statistics(
    input: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    start: int,
    end: int,
    with_logits: bool,
    num_threads: int,
) -> tuple: ...
def statistics_bound(input: np.ndarray, weight: np.ndarray, logits: np.ndarray | None) -> int: ...
def top_k(call: Call, log_prob: np.ndarray, index: np.ndarray, num_threads: int) -> None: ...
def top_k_bound(call: Call) -> int: ...
def loss_and_gradients(call: Call, results: list[np.ndarray | None], num_threads: int) -> None: ...
def part_top_k(
    input: np.ndarray,
    weight: np.ndarray,
    k: int,
    options: dict[str, Any],
    log_prob: np.ndarray,
    index: np.ndarray,
    rest: np.ndarray,
    workspace_bytes: int,
    num_threads: int,
) -> None: ...
def part_statistics(
    input: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    options: dict[str, Any],
    to_logits: np.ndarray | None,
    workspace_bytes: int,
    num_threads: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
def part_gradients(
    input: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    options: dict[str, Any],
    numbers: np.ndarray,
    target_logits: np.ndarray,
    target_weights: np.ndarray,
    results: dict[str, np.ndarray | None],
    logits: np.ndarray | None,
    workspace_bytes: int,
    num_threads: int,
) -> None: ...
def loss_bound(call: Call, results: list[np.ndarray | None]) -> int: ...
def probabilities(
    logits: np.ndarray, logits_max: np.ndarray, sum_exp: np.ndarray, out: np.ndarray, num_threads: int
) -> None: ...
def losses(sum_exp: np.ndarray, predicted: np.ndarray, loss: np.ndarray) -> None: ...
def plans(
    input: np.ndarray,
    weight: np.ndarray,
    rows: int,
    workspace_bytes: int,
    with_logits: bool,
    with_input_grad: bool,
    with_weight_grad: bool,
    buffers_weight_grad: bool,
    with_statistics: bool = False,
    weight_grad_bytes: int = 0,
    top_k: int = 0,
) -> list[PlanDescription]: ...
def default_workspace_bytes(
    input: np.ndarray, weight: np.ndarray, with_input_grad: bool, with_weight_grad: bool
) -> int: ...
def least_workspace_bytes(
    input: np.ndarray,
    weight: np.ndarray,
    with_logits: bool,
    with_input_grad: bool,
    with_weight_grad: bool,
    buffers_weight_grad: bool,
    with_statistics: bool = False,
    is_loss: bool = False,
    top_k: int = 0,
) -> int: ...
def plan_for_gradient(
    input: np.ndarray,
    weight: np.ndarray,
    softmax: np.ndarray | None,
    input_grad: np.ndarray | None,
    weight_grad: np.ndarray | None,
    workspace_bytes: int,
    num_threads: int,
) -> tuple[str, int]: ...
def plan_for_statistics(input: np.ndarray, weight: np.ndarray, num_threads: int) -> tuple[str, int]: ...
def plan_for_top_k(call: Call, num_threads: int) -> tuple[str, int]: ...
def plan_for_loss(call: Call, results: list[np.ndarray | None], num_threads: int) -> tuple[str, int]: ...
def plan_for_probabilities(logits: np.ndarray | None, num_threads: int) -> tuple[str, int]: ...
