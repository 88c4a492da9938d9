"""Test the classes of exceptions, their messages, and that exceptions survive pickling."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, Hostile, outcome

import ascend_grad as ag


def test_classes_of_exceptions():
    assert issubclass(NULL, (ag.AscendGradError, ValueError))
    assert issubclass(INVALID, ag.AscendGradError)
    assert issubclass(INVALID, ValueError)
    assert issubclass(TYPE, INVALID)
    assert issubclass(TYPE, TypeError)
    for other in (ag.UnsupportedDeviceError, ag.BackendUnavailableError):
        assert issubclass(other, ag.AscendGradError)
        assert issubclass(other, RuntimeError)
    assert (NULL.code, INVALID.code, TYPE.code) == (161001, 161002, 161002)
    assert ag.UnsupportedDeviceError.code == 361001


@pytest.mark.parametrize("kind", [NULL, INVALID, TYPE, ag.UnsupportedDeviceError, ag.BackendUnavailableError])
def test_exceptions_survive_pickling(kind):
    error = kind("axis: expected this, got that", operator="softmax")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert (str(twin), twin.code, twin.operator) == (str(error), error.code, "softmax")
        assert twin.args == error.args


def test_raised_exceptions_survive_pickling(backend):
    error = outcome(ag.softmax_backward, np.zeros(3), np.zeros(4), backend=backend)
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), twin.code, twin.operator) == (INVALID, str(error), 161002, "softmax_backward")


def test_a_conversion_that_fails_is_the_cause(backend):
    error = outcome(ag.softmax, Hostile(), backend=backend)
    assert isinstance(error.__cause__, RuntimeError)
    assert "not today" in str(error)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_about_the_argument_passes_through(interruption, backend):
    class Interrupting:
        def __array__(self, dtype=None, copy=None):
            raise interruption

    with pytest.raises(interruption):
        ag.softmax(Interrupting(), backend=backend)


def test_messages_are_short(backend):
    """An error about a large argument has a short message."""
    many = list(range(100_000))
    for arguments in (
        {"axis": many},
        {"axis": 10**5000},
        {"num_threads": many},
        {"num_threads": -(10**5000)},
        {"backend": str(many)},
        {"input": str(many)},
    ):
        error = outcome(ag.softmax, **({"input": np.zeros(3), "backend": backend} | arguments))
        assert len(str(error)) < 300
