from contextvars import ContextVar
from logging import Logger
from typing import Any, NamedTuple

from ._call import Call, Operator

backend_choice: ContextVar[Any]
logger: Logger

class _Choice(NamedTuple):
    backend: str
    reason: str

class Explanation(_Choice):
    variant: str | None
    plan: str | None
    threads: int | None
    estimated_ns: float | None
    details: str | None
    transferred_bytes: int | None
    def __new__(
        cls,
        backend: str,
        reason: str,
        variant: str | None = None,
        plan: str | None = None,
        threads: int | None = None,
        estimated_ns: float | None = None,
        details: str | None = None,
        transferred_bytes: int | None = None,
    ) -> Explanation: ...

def checked_backend(name: object, operator: str | None = None, argument: str = "backend") -> str: ...
def requested(backend: str | None, operator: Operator | None = None) -> tuple[str, str]: ...
def run(operator: Operator, values: list[Any], out: object, backend: str | None, num_threads: int | None) -> Any: ...
def prepared(
    operator: Operator, values: list[Any], out: object, backend: str | None, num_threads: int | None
) -> tuple[Call, int, Explanation]: ...
