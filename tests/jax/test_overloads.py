"""Check that the signatures for type checkers have all options of the functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from overloads import assert_all_options

import ascend_grad.jax as agj
from ascend_grad.option_types import JaxLinearLossOptions, JaxLossOptions


@pytest.mark.parametrize(
    ("function", "options"), [(agj.cross_entropy, JaxLossOptions), (agj.linear_cross_entropy, JaxLinearLossOptions)]
)
def test_overloads_have_all_options(function: Callable, options: type):
    assert_all_options(function, options)
