"""The operators for dask arrays, computed lazily and block by block.

>>> import dask.array as da
>>> import ascend_grad.dask as agd
>>> agd.softmax(da.zeros((4, 2), chunks=(2, 2))).compute()[0]
array([0.5, 0.5])
"""

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(f"ascend_grad.dask needs dask (pip install 'dask[array]'): {error}", name="dask") from error

from .losses import cross_entropy, linear_cross_entropy, linear_top_k
from .rowwise import (
    log_softmax,
    log_softmax_backward,
    scaled_masked_softmax,
    scaled_masked_softmax_backward,
    softmax,
    softmax_backward,
)

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_top_k",
    "log_softmax",
    "log_softmax_backward",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "softmax",
    "softmax_backward",
]
