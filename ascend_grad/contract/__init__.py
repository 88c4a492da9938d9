"""The contract of every operator, in one place: what it takes, in which order that is checked, what it returns.

Every backend receives calls that passed these checks, so that a bad call fails the same way everywhere. The checks
themselves are compiled, in `_checks`; `rowwise` and `linear` describe the operators of the two families, `parallel`
what each rank checks by itself of a call that several ranks make together.
"""

from __future__ import annotations

from .linear import LINEAR, MIN_WORKSPACE_BYTES
from .rowwise import ROWWISE

__all__ = ["LINEAR", "MIN_WORKSPACE_BYTES", "OPERATORS", "ROWWISE"]

#: By name.
OPERATORS = {operator.name: operator for operator in (*ROWWISE, *LINEAR)}
