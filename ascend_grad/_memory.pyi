import numpy as np

HUGE_THRESHOLD: int

def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...
