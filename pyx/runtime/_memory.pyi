import numpy as np

HUGE_THRESHOLD: int

class Mapping: ...

def copy_into(to: np.ndarray, source: np.ndarray) -> None: ...
