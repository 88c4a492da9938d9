from contextvars import ContextVar
from typing import Any

chosen: ContextVar[Any]

def is_plain_cpu(backend: object, array: object, only_halves: bool = False) -> bool: ...
