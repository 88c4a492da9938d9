"""Losses of problems whose vocabulary or tokens are split over several processes.

Every rank calls the same function with its part. MPI (through mpi4py) or torch.distributed transfers the numbers. Here
is a single process; under ``mpiexec``, pass ``comm=MPI.COMM_WORLD`` and this rank's rows of the weight:

>>> import numpy as np
>>> from ascend_grad import parallel
>>> start, stop = parallel.vocab_range(4, 0, 1)
>>> parallel.linear_cross_entropy(np.eye(2), np.zeros((4, 2))[start:stop], np.array([0, 3]), comm=None).loss.round(4)
np.float64(1.3863)
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
