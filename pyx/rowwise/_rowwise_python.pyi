import numpy as np
from numpy.typing import NDArray

MASKED_LOGIT: float

def stream_add(
    a: NDArray[np.float32], b: NDArray[np.float32], out: NDArray[np.float32], nontemporal: bool, num_threads: int
) -> None: ...
