import numpy as np

class Rows:
    total: int
    count: int
    def __init__(
        self,
        target: np.ndarray,
        start: int,
        end: int,
        mask: np.ndarray | None = None,
        grad: np.ndarray | None = None,
        maximum: np.ndarray | None = None,
        sum: np.ndarray | None = None,
        ignored: int | None = None,
    ) -> None: ...
