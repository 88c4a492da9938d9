import numpy as np

class ArrayType:
    library: str | None
    def view(self, value: object, name: str, operator: str | None) -> np.ndarray | None: ...

def array_type(value: object, name: str, operator: str | None) -> ArrayType | None: ...
