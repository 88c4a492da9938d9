"""From a public call to the backend that computes it."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, NoReturn

from . import _cpu, contract
from ._short_way import chosen
from .backends import AUTOMATIC, REGISTRY
from .config import BACKENDS, ENVIRONMENT
from .contract import Call, Operator
from .errors import BackendUnavailableError, MissingKernelError, ParamInvalidError

logger = logging.getLogger("ascend_grad")


class Explanation(NamedTuple):
    """Who computes a call, and why."""

    backend: str
    reason: str


def _checked(name: object, operator: str | None = None) -> str:
    if not isinstance(name, str) or name not in BACKENDS:
        expected = f"one of {', '.join(BACKENDS)}"
        raise ParamInvalidError(f"backend: expected {expected}, got {contract.shown(name)}", operator=operator)
    return name


def requested(backend: str | None, operator: str | None = None) -> tuple[str, str]:
    """The backend that is asked for, and by what: the argument, `use_backend`, the environment, or nobody."""
    if backend is not None:
        return _checked(backend, operator), "the backend argument"
    choice = _choice()
    if choice.name is not None:
        return choice.name, "use_backend"
    if ENVIRONMENT.backend is not None:
        return ENVIRONMENT.backend, "ASCEND_GRAD_BACKEND"
    return "auto", "automatic choice"


def select(call: Call, backend: str | None) -> Explanation:
    """Choose the backend for a validated call, or raise where the one that was asked for cannot take it."""
    name, source = requested(backend, call.operator.name)
    if call.device is not None:
        return _on_the_card(call, name, source)
    if name != "auto":
        usable, reason = REGISTRY[name].status()
        if not usable:
            _cannot(call, name, source, reason)
        refusal = REGISTRY[name].refusal(call)
        if refusal is not None and refusal.error is not None:
            raise refusal.error
        return Explanation(name, f"asked for by {source}")
    passed_over: list[str] = []
    for name in AUTOMATIC:
        usable, reason = REGISTRY[name].status()
        refusal = REGISTRY[name].refusal(call) if usable else None
        if usable and refusal is None:
            return Explanation(name, "; ".join([source, *passed_over]))
        passed_over.append(f"not {name}: {reason if refusal is None else refusal.reason}")
    raise BackendUnavailableError("; ".join(passed_over), operator=call.operator.name)


def _on_the_card(call: Call, name: str, source: str) -> Explanation:
    """Arrays on a card are computed there or not at all."""
    if name not in ("auto", "npu"):
        _cannot(call, name, source, f"its arrays are on device {call.device} (numpy() brings them back)")
    usable, reason = REGISTRY["npu"].status()
    if not usable:
        _cannot(call, "npu", source, reason)
    refusal = REGISTRY["npu"].refusal(call)
    if refusal is not None and refusal.error is not None:
        raise refusal.error
    return Explanation("npu", f"its arrays are on device {call.device}")


def _cannot(call: Call, name: str, source: str, reason: str) -> NoReturn:
    message = f"backend {name!r} ({source}) cannot compute this call: {reason}"
    raise BackendUnavailableError(message, operator=call.operator.name)


def run(operator: Operator, arguments: dict[str, Any], out: object, backend: str | None, num_threads: int | None):
    """Validate, choose, compute."""
    # Conversions and rounding on the way do not depend on the caller's floating-point mode either.
    mode = _cpu.enter_mode()
    try:
        requested(backend, operator.name)
        num_threads = contract.checked_num_threads(num_threads, operator.name)
        call = contract.validate(operator, arguments, out)
        try:
            return _computed(call, backend, num_threads)
        except MissingKernelError:
            if call.device is not None or requested(backend)[0] != "auto":
                raise
        # Nothing was computed, and the device's refusal is known now: who left the choice to us gets another backend.
        return _computed(call, backend, num_threads)
    finally:
        _cpu.leave_mode(mode)


def _computed(call: Call, backend: str | None, num_threads: int | None):
    choice = select(call, backend)
    if logger.isEnabledFor(logging.DEBUG):
        shapes = ", ".join(f"{array.dtype}{array.shape}" for array in call.arrays)
        logger.debug("%s of %s: %s, %s", call.operator.name, shapes, choice.backend, choice.reason)
    return REGISTRY[choice.backend].run(call, num_threads)


class _Block(NamedTuple):
    """A ``with`` block of `use_backend` that was entered and not left."""

    owner: use_backend
    outer: str | None  # what to go back to


class _Choice(NamedTuple):
    """What was chosen in a context (thread or task). It is replaced, never changed: copies of the context share it."""

    name: str | None = None
    #: The object whose making was the last choice, and the name before: entered now, its block goes back to that.
    made_by: use_backend | None = None
    before: str | None = None
    blocks: tuple[_Block, ...] = ()  # the innermost last


def _choice() -> _Choice:
    return chosen.get() or _Choice()


class use_backend:
    """Choose the backend of the calls that follow, in this context (thread or task).

    As a function it acts at once and lasts; as a context manager it is undone at the end of the block.

    Parameters
    ----------
    name : {"auto", "cpu", "npu", "reference"}
        The backend; ``"auto"`` overrides the environment's choice, too.

    Raises
    ------
    ParamInvalidError
        161002, if there is no backend of that name.
    RuntimeError
        On leaving a block that was not entered in this context.

    Notes
    -----
    One object may be entered any number of times, within itself and in several threads or tasks at once. A task or
    thread that starts with a copy of the context starts with its choice. A generator has no context of its own: a block
    that is open while it yields also holds for whoever asks it for values.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> with ag.use_backend("reference"):
    ...     ag.explain("softmax", [1.0, 2.0]).backend
    'reference'
    """

    def __init__(self, name: str):
        self.name = _checked(name)
        choice = _choice()
        chosen.set(_Choice(self.name, self, choice.name, choice.blocks))

    def __enter__(self) -> use_backend:
        choice = _choice()
        outer = choice.before if choice.made_by is self else choice.name
        chosen.set(_Choice(self.name, blocks=(*choice.blocks, _Block(self, outer))))
        return self

    def __exit__(self, *exc_info) -> None:
        choice = _choice()
        blocks = list(choice.blocks)
        place = next((i for i in reversed(range(len(blocks))) if blocks[i].owner is self), None)
        if place is None:
            raise RuntimeError(f"use_backend({self.name!r}): there is no block of it to leave in this thread or task")
        outer = blocks.pop(place).outer
        if place == len(blocks):
            chosen.set(_Choice(outer, blocks=tuple(blocks)))
            return
        # A block that was entered later is still open, as one of a generator may be: it goes back to what this one had.
        blocks[place] = blocks[place]._replace(outer=outer)
        chosen.set(choice._replace(blocks=tuple(blocks)))
