from typing import Any, NamedTuple

import numpy as np

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
