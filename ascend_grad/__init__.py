"""Fast softmax and cross-entropy, with gradients, for NumPy arrays on the CPU and on Huawei Ascend NPUs.

>>> import numpy as np
>>> import ascend_grad as ag
>>> y = ag.softmax(np.zeros((2, 4), np.float32))
>>> ag.softmax_backward(np.eye(2, 4, dtype=np.float32), y)
array([[ 0.1875, -0.0625, -0.0625, -0.0625],
       [-0.0625,  0.1875, -0.0625, -0.0625]], dtype=float32)

The loss of logits and its gradient, and the same for a linear layer without its logits in memory:

>>> logits, target = np.zeros((2, 4)), np.array([0, 3])
>>> loss, grad = ag.cross_entropy(logits, target)
>>> loss.round(4)
np.float64(1.3863)
>>> hidden, weight = np.eye(2), np.zeros((4, 2))
>>> ag.linear_cross_entropy(hidden, weight, target).loss.round(4)
np.float64(1.3863)
"""

try:
    from . import _compiled  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the compiled modules of ascend_grad cannot be imported from {__path__[0]} ({error}); if that is the source "
        "tree, start Python in another folder, or build in place with: pip install -e ."
    ) from error

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .backends import backends
from .context_choice import use_backend
from .errors import (
    AclError,
    AscendGradError,
    BackendUnavailableError,
    ParamInvalidError,
    ParamNullptrError,
    ParamTypeError,
    UnsupportedDeviceError,
)
from .inspection import explain, get_include, show_config, workspace_size
from .operators.functions import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
    log_softmax,
    log_softmax_backward,
    scaled_masked_softmax,
    scaled_masked_softmax_backward,
    softmax,
    softmax_backward,
)
from .operators.losses import cross_entropy, linear_cross_entropy, linear_cross_entropy_backward, linear_top_k
from .operators.results import LossResult
from .operators.second_order import cross_entropy_hvp, linear_cross_entropy_hessian, linear_cross_entropy_hvp
from .threads import get_num_threads, set_num_threads

__all__ = [
    "AclError",
    "AscendGradError",
    "BackendUnavailableError",
    "LossResult",
    "ParamInvalidError",
    "ParamNullptrError",
    "ParamTypeError",
    "UnsupportedDeviceError",
    "__version__",
    "backends",
    "cross_entropy",
    "cross_entropy_hvp",
    "explain",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
    "fused_linear_online_max_sum",
    "get_include",
    "get_num_threads",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_hessian",
    "linear_cross_entropy_hvp",
    "linear_top_k",
    "log_softmax",
    "log_softmax_backward",
    "npu",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "set_num_threads",
    "show_config",
    "softmax",
    "softmax_backward",
    "use_backend",
    "workspace_size",
]


if TYPE_CHECKING:
    from . import npu
else:  # most machines have no device: the module is imported when it is needed

    def __getattr__(name: str) -> Any:
        if name != "npu":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"{__name__}.npu")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
