from collections.abc import Iterable, Sequence

from ._acl import AnyStream, DeviceRange

DTYPES: dict[str, int]

def bind(libraries: Iterable[int]) -> dict[str, str]: ...

class Tensor:
    def __init__(
        self,
        memory: DeviceRange | None,
        shape: Sequence[int],
        dtype: int,
        layout: tuple[Sequence[int], int, int] | None = None,
    ) -> None: ...
    def close(self) -> None: ...

class Executor:
    workspace_size: int
    def launch(self, workspace: DeviceRange | None, stream: AnyStream) -> None: ...
    def close(self) -> None: ...

def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, out: Tensor) -> Executor: ...
def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, out: Tensor) -> Executor: ...
def softmax(input: Tensor, dim: int, out: Tensor) -> Executor: ...
def log_softmax(input: Tensor, dim: int, out: Tensor) -> Executor: ...
def scaled_masked_softmax_backward(
    grad_output: Tensor, y: Tensor, mask: Tensor, scale: float, out: Tensor
) -> Executor: ...
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float, out: Tensor) -> Executor: ...
def fused_linear_cross_entropy_loss_grad(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    logits_max: Tensor | None,
    sum_exp_logits: Tensor | None,
    softmax: Tensor | None,
    input_grad: Tensor,
    weight_grad: Tensor,
) -> Executor: ...
def fused_linear_online_max_sum(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    predicted_logits: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    vocab_parallel_logits: Tensor | None,
) -> Executor: ...
def fused_cross_entropy_loss_with_max_sum(
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    predicted_logits: Tensor,
    vocab_parallel_logits: Tensor | None,
    loss: Tensor,
    softmax: Tensor | None,
) -> Executor: ...
