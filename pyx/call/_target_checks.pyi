from typing import Any

from numpy.typing import NDArray

from ._call import Check

def looks_one_hot(ids: NDArray[Any], classes: int) -> bool: ...

class Targets(Check):
    def __init__(self, target: str, target_prob: str, rows: str) -> None: ...

class NothingOfOneTarget(Check):
    def __init__(self) -> None: ...

class ZeroProbabilities(Check):
    def __init__(self, target: str) -> None: ...

class NumberOfEachTarget(Check):
    def __init__(self, name: str, target: str, rows: str) -> None: ...

class Classes(Check):
    def __init__(self, name: str, *, allows_dense: bool = False) -> None: ...

class TargetsInRange(Check):
    def __init__(self) -> None: ...

class TargetsInTheVocabulary(Check):
    def __init__(self, vocab_start_index: str | None = None) -> None: ...
