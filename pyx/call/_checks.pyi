from ._call import Check
from .operators.options import Range

class NotNone(Check): ...

class Floating(Check):
    def __init__(self, *names: str, converts: bool = False) -> None: ...

class Dtype(Check):
    def __init__(self, name: str, *dtypes: str, note: str = "") -> None: ...

class Number(Check):
    def __init__(self, name: str, allowed: Range | None = None, *, is_optional: bool = False) -> None: ...

class AxisInRange(Check):
    def __init__(self, name: str) -> None: ...

class SameShape(Check): ...

class Rank(Check):
    def __init__(self, name: str, low: int, high: int) -> None: ...

class MaskCovers(Check): ...

class NoTriuMask(Check):
    def __init__(self) -> None: ...

class Shape(Check):
    def __init__(self, name: str, *dims: str) -> None: ...

class TrueOrFalse(Check): ...

class Integer(Check):
    def __init__(
        self,
        name: str,
        low: int = 0,
        high: int = ...,
        *,
        counts_entries: bool = False,
        precedes_entries: bool = False,
    ) -> None: ...
