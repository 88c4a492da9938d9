"""Losses of problems whose vocabulary or tokens are split over several processes.

Every rank calls the same function with its part. MPI (through mpi4py) or torch.distributed transfers the numbers.

>>> from ascend_grad import parallel
>>> parallel.vocab_range(151936, 3, 8)
(56976, 75968)
"""

from ..errors import RankError
from .communicators import Communicator
from .data_parallel import data_parallel_linear_cross_entropy
from .ranges import vocab_range
from .top_k import linear_top_k
from .vocabulary_parallel import linear_cross_entropy, linear_cross_entropy_backward

__all__ = [
    "Communicator",
    "RankError",
    "data_parallel_linear_cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_top_k",
    "vocab_range",
]
