"""Check that the signatures for type checkers have all options of the functions."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

import pytest

import ascend_grad.jax as agj
from ascend_grad.option_types import LinearLossOptions, LossOptions


@pytest.mark.parametrize(
    ("function", "options"), [(agj.cross_entropy, LossOptions), (agj.linear_cross_entropy, LinearLossOptions)]
)
def test_overloads_have_all_options(function: Callable, options: type):
    overloads = typing.get_overloads(function)
    assert len(overloads) == 2
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        named = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert not named & set(options.__annotations__)
        assert named | set(options.__annotations__) == set(inspect.signature(function).parameters)
