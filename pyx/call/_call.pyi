from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .sparse_arrays import SparseRows

ACCUMULATOR: Final = "accumulator"

class ResultSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None

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
        asked_by: tuple[str | tuple[str, int | str], ...] = (),
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
    value_checks: tuple[Check, ...]
    result_specs: tuple[Result, ...]
    results: tuple[str, ...]
    slots: dict[str, int]
    def __init__(
        self,
        name: str,
        device_name: str | None,
        parameters: str,
        *,
        arrays: str,
        checks: Sequence[Check],
        value_checks: Sequence[Check] = (),
        results: Sequence[Result],
        family: str,
        kernels: str,
        optional: str = "",
        mixes: str = "",
        out: str | None = None,
        sparse: str = "",
        operands: str = "",
        mask: str = "",
        scale: str = "",
    ) -> None: ...

class Call:
    operator: Operator
    values: list[Any]
    sparse: SparseRows | None
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
    def leading(self) -> tuple[int, ...] | None: ...
    @property
    def device(self) -> int | None: ...
    def with_arguments(self, arguments: Mapping[str, Any]) -> Call: ...
    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...
    def in_library(self, results: Sequence[Any]) -> list[Any]: ...

def checked(operator: Operator, values: list[Any]) -> Call: ...
