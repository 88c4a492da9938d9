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
def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    loss: Tensor,
    log_prob: Tensor,
    zloss: Tensor,
    lse_for_zloss: Tensor,
) -> Executor: ...
def cross_entropy_loss_grad(grad_loss: Tensor, log_prob: Tensor, target: Tensor, out: Tensor) -> Executor: ...
def softmax_cross_entropy_with_logits(features: Tensor, labels: Tensor, loss: Tensor, backprop: Tensor) -> Executor: ...
def log_sum_exp(input: Tensor, out: Tensor) -> Executor: ...
def row_sums(input: Tensor, out: Tensor) -> Executor: ...
def exp(input: Tensor, out: Tensor) -> Executor: ...
def inplace_copy(out: Tensor, source: Tensor) -> Executor: ...
def cast(input: Tensor, dtype: int, out: Tensor) -> Executor: ...
def mul(input: Tensor, other: Tensor, out: Tensor) -> Executor: ...
def inplace_add(out: Tensor, other: Tensor) -> Executor: ...
