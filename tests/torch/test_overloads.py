"""Check that the signatures for type checkers have all options of the functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from overloads import assert_all_options

import ascend_grad.torch as agt
from ascend_grad.torch.option_types import LinearOptions, Options


@pytest.mark.parametrize(
    ("function", "options"), [(agt.cross_entropy, Options), (agt.linear_cross_entropy, LinearOptions)]
)
def test_overloads_have_all_options(function: Callable, options: type):
    assert_all_options(function, options)
