import numpy as np

HUGE_THRESHOLD: int

class Mapping: ...

def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...
