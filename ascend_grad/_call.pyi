from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

ACCUMULATOR: Final = "accumulator"

class ResultSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype

class Check:
    names: tuple[str, ...]
    def __init__(self, *names: str) -> None: ...

class Result:
    name: str
    like: str
    def __init__(
        self,
        name: str,
        like: str,
        *,
        dims: tuple[str, ...] | None = None,
        dtype: str | np.dtype | None = None,
        asked_by: tuple[str | tuple[str, int], ...] = (),
        reduced_by: str | None = None,
    ) -> None: ...
    def spec(self, call: Call) -> ResultSpec | None: ...

class Operator:
    name: str
    device_name: str | None
    parameters: tuple[str, ...]
    array_names: tuple[str, ...]
    optional_names: tuple[str, ...]
    checks: tuple[Check, ...]
    result_specs: tuple[Result, ...]
    results: tuple[str, ...]
    def __init__(
        self,
        name: str,
        device_name: str | None,
        parameters: str,
        *,
        arrays: str,
        checks: Sequence[Check],
        results: Sequence[Result],
        optional: str = "",
    ) -> None: ...

class Call:
    operator: Operator
    values: list[Any]
    @property
    def outs(self) -> tuple[np.ndarray | None, ...]: ...
    @property
    def arguments(self) -> dict[str, Any]: ...
    @property
    def arrays(self) -> list[np.ndarray]: ...
    @property
    def specs(self) -> tuple[ResultSpec | None, ...]: ...
    @property
    def dims(self) -> dict[str, int]: ...
    @property
    def device(self) -> int | None: ...
    def with_arguments(self, arguments: Mapping[str, Any]) -> Call: ...

class AccumulatorOf(Check): ...
class AVocabulary(Check): ...
class BitsOrBooleans(Check): ...
class Boolean(Check): ...

class ChosenResults(Check):
    def __init__(self) -> None: ...

class DimInRange(Check):
    def __init__(self, name: str) -> None: ...

class Float32OrFloat64(Check): ...
class Floating(Check): ...
class Int32OrInt64(Check): ...

class IntegerFrom(Check):
    def __init__(self, name: str, low: int) -> None: ...

class LogitsBeside(Check): ...
class MaskCovers(Check): ...
class MaskHasRows(Check): ...

class NoLabelSmoothing(RealNumber):
    def __init__(self) -> None: ...

class NotNone(Check): ...

class NoTriuMask(Check):
    def __init__(self) -> None: ...

class OneMode(Check):
    def __init__(self) -> None: ...

class RankAtMost(Check):
    def __init__(self, name: str, limit: int) -> None: ...

class RankExactly(Check):
    def __init__(self, name: str, rank: int) -> None: ...

class RealNumber(Check): ...

class ReductionAndItsGradient(Check):
    def __init__(self) -> None: ...

class SameShape(Check): ...

class Shape(Check):
    def __init__(self, name: str, *dims: str) -> None: ...

class TargetsInRange(Check):
    def __init__(self) -> None: ...

class TargetsInTheVocabulary(Check):
    def __init__(self) -> None: ...

class TrueOrFalse(Check): ...

class VocabularyBounds(Check):
    def __init__(self) -> None: ...

class WorkspaceAndFilter(Check):
    least: int
    def __init__(self, least: int) -> None: ...
