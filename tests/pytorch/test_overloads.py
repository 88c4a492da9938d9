"""Check that the signatures for type checkers have all options of the functions."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

import pytest

import ascend_grad.torch as agt
from ascend_grad.option_types import LossOptions
from ascend_grad.torch.option_types import LinearOptions


@pytest.mark.parametrize(
    ("function", "options"), [(agt.cross_entropy, LossOptions), (agt.linear_cross_entropy, LinearOptions)]
)
def test_overloads_have_all_options(function: Callable, options: type):
    overloads = typing.get_overloads(function)
    assert len(overloads) == 2
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        named = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert not named & set(options.__annotations__)
        assert named | set(options.__annotations__) == set(inspect.signature(function).parameters)
