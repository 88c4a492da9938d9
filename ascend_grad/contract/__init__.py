"""The contract of every operator: its arguments, the order of their checks, and its results.

Every backend receives calls that passed these checks, so that a bad call fails the same way everywhere. The checks
themselves are compiled, in `_checks`. `rowwise`, `linear` and `losses` describe the operators of the three families;
`parallel` describes the checks of a rank's own arguments.
"""

from __future__ import annotations

from .linear import LINEAR, MIN_WORKSPACE_BYTES
from .losses import LOSSES
from .rowwise import ROWWISE

__all__ = ["LINEAR", "LOSSES", "MIN_WORKSPACE_BYTES", "OPERATORS", "ROWWISE"]

#: All operators by name.
OPERATORS = {operator.name: operator for operator in (*ROWWISE, *LINEAR, *LOSSES)}
