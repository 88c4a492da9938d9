"""Provide the fixtures of the tests of the NPU backend and of the device's test double."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import stand_in
from acl_client import Acl
from device_limits import SYSTEMS
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


@pytest.fixture(params=[(family, soc) for family, names in SYSTEMS.items() for soc in names], ids=lambda each: each[1])
def family(request, double) -> str:
    """Return the family of a system on chip, which the test double has during the test."""
    name, soc = request.param
    double.set_soc(soc)
    return name


@pytest.fixture
def integers(acl) -> Iterator[Callable[..., int]]:
    made: list[int] = []

    def create(*values: int) -> int:
        made.append(acl.aclCreateIntArray((ctypes.c_int64 * len(values))(*values), len(values)))
        return made[-1]

    yield create
    for each in made:
        assert acl.aclDestroyIntArray(each) == 0


@pytest.fixture
def scalar(acl) -> Iterator[Callable[[float], int]]:
    made: list[int] = []

    def create(value: float) -> int:
        made.append(acl.aclCreateScalar(ctypes.byref(ctypes.c_double(value)), 11))
        return made[-1]

    yield create
    for each in made:
        assert acl.aclDestroyScalar(each) == 0
