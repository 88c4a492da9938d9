"""The operators for dask arrays, computed lazily and block by block.

>>> import dask.array as da
>>> import ascend_grad.dask as agd
>>> logits, target = da.zeros((2, 4), chunks=(1, 4)), da.from_array([0, 3], chunks=1)
>>> agd.cross_entropy(logits, target).loss.compute().round(4)
np.float64(1.3863)
"""

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(f"ascend_grad.dask needs dask (pip install 'dask[array]'): {error}", name="dask") from error

from . import rowwise
from .losses import cross_entropy, linear_cross_entropy, linear_top_k
from .rowwise import *

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_top_k",
]
__all__ += rowwise.__all__
