"""Test which arguments each operator refuses, in which order it checks them, and that all backends take the same calls.

A fault spoils one argument of a good call. It belongs to a stage of the operator's checks. If a call has two faults,
the fault of the earlier stage decides which error is raised. The two modes of the linear gradient are two cases.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from functools import partial

import linear_faults
import numpy as np
import pytest
import rowwise_faults
from faults import CODES, NULL, Case, Fault, about, outcome
from linear_samples import GRADIENT, LINEAR, LOSS, TOP_K, WITHOUT_PROBLEMS
from samples import ARRAYS, OPERATORS, assert_identical

import ascend_grad as ag
from ascend_grad import errors as library_errors
from ascend_grad.backends import REGISTRY
from ascend_grad.operators import table
from ascend_grad.operators.options import OPTIONS

CASES = rowwise_faults.CASES | linear_faults.CASES

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def untouched(arguments: dict) -> bool:
    """Return whether the results of a good call are unwritten."""
    outs = arguments.get("out")
    return all(np.all(out == 7) for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None)


def questions_about(case: Case) -> list[Callable]:
    return [partial(question, case.operator) for question in (ag.explain, ag.workspace_size)]


def assert_refused(case: Case, fault: Fault, *, empty: bool) -> None:
    """Check that all backends, `explain` and `workspace_size` raise the same exception, and that nothing is written."""
    good = case.good_call(empty=empty)
    arguments = good | {fault.argument: fault.spoil(good[fault.argument])}
    calls = [(getattr(ag, case.operator), backend) for backend in ("cpu", "reference", "npu", None, "auto")]
    calls += [(question, None) for question in questions_about(case)]
    messages = set()
    for function, backend in calls:
        settings = {"backend": backend} if fault.argument != "backend" else {}
        error = outcome(function, **arguments | settings)
        assert type(error) is fault.raises, error
        assert error.code == CODES[fault.raises]
        assert error.operator == case.operator
        messages.add(str(error))
    (message,) = messages
    assert message.startswith(f"{case.operator}: {fault.blamed}: expected ")
    assert ", got " in message
    assert str(error.code) not in message
    assert library_errors.STATUS_NAMES[error.code] not in message
    assert len(message) < 400
    assert untouched(good)


ARGUMENTS = [
    pytest.param(case, argument, id=f"{name}-{argument}")
    for name, case in CASES.items()
    for argument in dict.fromkeys(fault.argument for fault in case.faults())
]


@pytest.mark.parametrize(("case", "argument"), ARGUMENTS)
def test_faults(case, argument, device):
    for empty in (False, True):
        for fault in case.faults(empty=empty):
            if fault.argument == argument:
                with about(f"{fault}{', empty' * empty}"):
                    assert_refused(case, fault, empty=empty)
    assert device.calls() == 0


@each_case
def test_good_calls_are_good(case, backend):
    for empty in (False, True):
        getattr(ag, case.operator)(**case.good_call(empty=empty) | {"backend": backend})


@each_case
def test_the_earlier_stage_decides(case, backend):
    """If a call has two faults, the fault of the earlier stage decides. All pairs of kinds of faults are tried."""
    order = case.stages.index
    few = {(fault.stage, fault.argument, fault.raises): fault for fault in case.faults()}
    for first, second in itertools.permutations(few.values(), 2):
        if order(first.stage) >= order(second.stage):
            continue
        arguments = case.good_call() | {"backend": backend}
        for fault in (second, first):
            arguments[fault.argument] = fault.spoil(arguments[fault.argument])
        with about(f"{first} decides before {second}"):
            error = outcome(getattr(ag, case.operator), **arguments)
            assert type(error) is first.raises
            assert f"{case.operator}: {first.blamed}: expected " in str(error)


@each_case
def test_every_stage_has_faults(case):
    assert {fault.stage for fault in case.faults()} == set(case.stages)


@each_case
def test_null_is_said_of_the_first(case, backend):
    names = table.OPERATORS[case.operator].array_names
    nothing = case.good_call() | dict.fromkeys(names)
    error = outcome(getattr(ag, case.operator), **nothing | {"backend": backend})
    assert type(error) is NULL
    assert str(error).startswith(f"{case.operator}: {names[0]}: ")


# ---- one contract for all --------------------------------------------------------------------------------------------


def test_operators_are_described_and_public():
    assert {operator.name for operator in table.ROWWISE} == set(OPERATORS)
    for operator in table.ROWWISE:
        name = operator.name
        assert name in ag.__all__
        assert table.OPERATORS[name] is operator
        assert operator.array_names == ARRAYS[name]
        parameters = inspect.signature(getattr(ag, name)).parameters
        assert tuple(parameters)[: len(ARRAYS[name])] == ARRAYS[name]
        keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keyword_only == [*(["dim"] if "axis" in parameters else []), "out", "backend", "num_threads"]
        assert all(parameters[name].default is None for name in keyword_only)


def test_linear_operators_are_described_and_public():
    assert {operator.name for operator in table.LINEAR} == {*LINEAR, TOP_K, *WITHOUT_PROBLEMS}
    for operator in table.LINEAR:
        assert operator.name in ag.__all__
        assert table.OPERATORS[operator.name] is operator
        parameters = inspect.signature(getattr(ag, operator.name)).parameters
        required = [p.name for p in parameters.values() if p.default is p.empty]
        assert required[: len(operator.array_names)] == list(operator.array_names)
        names = set(operator.optional_names) - {"temperature", "grad_loss"}  # these may also be numbers
        assert all(parameters[name].default is None for name in names)
        assert list(parameters)[-2:] == ["backend", "num_threads"]
        takes_out = operator.name in (GRADIENT, LOSS)
        assert ("out" in parameters) == takes_out


def test_backends_have_one_interface():
    signatures = []
    for backend in REGISTRY.values():
        assert REGISTRY[backend.NAME] is backend
        usable, reason, *_ = backend.status()
        assert isinstance(usable, bool)
        assert reason
        functions = backend.status, backend.run
        signatures.append([list(inspect.signature(function).parameters) for function in functions])
    assert all(signature == signatures[0] for signature in signatures)


def test_names_of_backends_of_other_classes():
    assert_identical(ag.softmax([0.0, 1.0], backend=np.str_("cpu")), ag.softmax([0.0, 1.0]))
    with ag.use_backend(np.str_("reference")):
        assert ag.explain("softmax", [0.0]) == ("reference", "requested by use_backend")


@each_case
def test_explain(case, backend):
    arguments = case.good_call()

    def explain(**settings):
        return ag.explain(case.operator, **arguments | settings)

    assert explain(backend=backend) == (backend, "requested by the backend argument")
    with ag.use_backend(backend):
        assert explain() == (backend, "requested by use_backend")
        assert explain(backend="cpu") == ("cpu", "requested by the backend argument")
    if backend == "npu":
        assert explain() == ("npu", "automatic choice")
    else:
        assert explain() == ("cpu", f"automatic choice; not npu: {ag.backends()['npu'].reason}")
    assert untouched(arguments)


@each_case
def test_what_is_asked_for_but_unavailable_is_an_error(case):
    reason = ag.backends()["npu"].reason
    assert not ag.backends()["npu"].usable
    for function in (getattr(ag, case.operator), *questions_about(case)):
        with pytest.raises(ag.BackendUnavailableError) as info:
            function(**case.good_call() | {"backend": "npu"})
        assert (info.value.operator, info.value.code) == (case.operator, None)
        cannot = "backend 'npu' (the backend argument) cannot compute this call"
        assert str(info.value) == f"{case.operator}: {cannot}: {reason}"


@each_case
def test_the_choice_computes(case, computed_by):
    """Calls run on the backend that was chosen, and the CPU never replaces it."""
    arguments = case.good_call()

    def call(**settings):
        computed_by.clear()
        getattr(ag, case.operator)(**arguments | settings)
        return computed_by or ["cpu"]  # the CPU's compiled function is called directly and not recorded

    assert call() == ["cpu"]
    assert call(backend="reference") == ["reference"]
    with ag.use_backend("reference"):
        assert call() == ["reference"]
        assert call(backend="cpu") == ["cpu"]
        assert call(backend="auto") == ["cpu"]
        if "out" in arguments:
            assert call(out=None) == ["reference"]
    with ag.use_backend("npu"):
        assert call(backend="cpu") == ["cpu"]
        with pytest.raises(ag.BackendUnavailableError):
            call()


@each_case
def test_questions_compute_nothing(case, computed_by):
    arguments = case.good_call()
    for question in questions_about(case):
        question(**arguments)
    assert not computed_by
    assert untouched(arguments)


@each_case
def test_every_call_is_logged(case, caplog):
    with caplog.at_level(logging.DEBUG, "ascend_grad"):
        getattr(ag, case.operator)(**case.good_call())
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ascend_grad", logging.DEBUG)
    message = record.getMessage()
    assert message.startswith(f"{case.operator} of float32(")
    assert ": cpu, automatic choice; not npu: " in message


@pytest.mark.parametrize(
    "name", ["cross_entropy", "linear_cross_entropy", "linear_cross_entropy_backward", "linear_top_k"]
)
def test_signatures_have_the_defaults_of_the_list_of_options(name):
    parameters = inspect.signature(getattr(ag, name)).parameters
    options = [option for option in OPTIONS if option in parameters]
    assert options
    assert {each: parameters[each].default for each in options} == {each: OPTIONS[each].default for each in options}


def test_arithmetic_on_results_is_refused():
    result = ag.cross_entropy(np.ones((2, 3), np.float32), np.array([0, 1]))
    calls = (
        lambda: 2 * result,
        lambda: np.float32(2) * result,
        lambda: np.ones(2) + result,
        lambda: result - 1,
        lambda: sum([result]),
        lambda: result + result,
    )
    for call in calls:
        with pytest.raises(TypeError, match="not a number; use its field"):
            call()


def test_results_are_concatenated_with_tuples():
    result = ag.cross_entropy(np.ones((2, 3), np.float32), np.array([0, 1]), return_grad=False)
    further = (2,)
    assert result + further == (result.loss, None, 2)
    assert further + result == (2, result.loss, None)
    loss = result.loss
    result += further
    assert result == (loss, None, 2)
