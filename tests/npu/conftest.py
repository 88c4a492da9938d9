"""Provide the fixtures of the tests of the NPU backend and of the device's test double."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import stand_in
from acl_client import Acl
from npu_samples import ALL


@pytest.fixture(params=ALL)
def any_operator(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def _library() -> tuple[stand_in.StandIn, Acl]:
    path = stand_in.build_alone()
    return stand_in.StandIn(path), Acl(path)


@pytest.fixture
def double(_library) -> Iterator[stand_in.StandIn]:
    """Return the control interface of the test double, and destroy afterwards the objects that the test made."""
    control, acl = _library
    control.reset()
    control.set_delay(0)
    control.set_soc("Ascend910B2")
    control.set_memory(1 << 30)
    if control.counter("initialisations") == 0:
        assert acl.aclInit(None) == 0
    assert acl.aclrtSetDevice(0) == 0
    yield control
    control.reset()
    acl.aclrtSetDevice(0)
    acl.clear()
    assert control.live() == {}


@pytest.fixture
def acl(double, _library) -> Acl:
    return _library[1]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)
