"""Check the signatures of overloads, which type checkers and editors read."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable


def assert_all_options(function: Callable, options: type) -> None:
    """Check that both overloads of a loss have all options of the function, by name or in the TypedDict `options`."""
    overloads = typing.get_overloads(function)
    assert len(overloads) == 2
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        named = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert not named & set(options.__annotations__)
        assert named | set(options.__annotations__) == set(inspect.signature(function).parameters)
