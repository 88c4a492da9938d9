"""Choices that outlast a call: of a backend here, others in terms of `ContextChoice`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self

from ._dispatch import checked_backend, chosen


class _Block(NamedTuple):
    """A ``with`` block of a `ContextChoice` that was entered and not left."""

    owner: ContextChoice
    outer: Any  # what to go back to


class _Choice(NamedTuple):
    """What was chosen in a context (thread or task). It is replaced, never changed: copies of the context share it."""

    value: Any = None
    #: The object whose making was the last choice, and the value before: entered now, its block goes back to that.
    made_by: ContextChoice | None = None
    before: Any = None
    blocks: tuple[_Block, ...] = ()  # the innermost last


class ContextChoice:
    """A choice that acts at once and lasts, or is undone at the end of a ``with`` block."""

    #: Holds a `_Choice`, or None.
    _variable: ClassVar[ContextVar[Any]]

    def __init__(self, value: object):
        self._value = value
        choice = self._choice()
        self._variable.set(_Choice(value, self, choice.value, choice.blocks))

    def _choice(self) -> _Choice:
        return self._variable.get() or _Choice()

    def __enter__(self) -> Self:
        choice = self._choice()
        outer = choice.before if choice.made_by is self else choice.value
        self._variable.set(_Choice(self._value, blocks=(*choice.blocks, _Block(self, outer))))
        return self

    def __exit__(self, *exc_info) -> None:
        choice = self._choice()
        blocks = list(choice.blocks)
        place = next((i for i in reversed(range(len(blocks))) if blocks[i].owner is self), None)
        if place is None:
            name = f"{type(self).__name__}({self._value!r})"
            raise RuntimeError(f"{name}: there is no block of it to leave in this thread or task")
        outer = blocks.pop(place).outer
        if place == len(blocks):
            self._variable.set(_Choice(outer, blocks=tuple(blocks)))
            return
        # A block that was entered later is still open, as one of a generator may be: it goes back to what this one had.
        blocks[place] = blocks[place]._replace(outer=outer)
        self._variable.set(choice._replace(blocks=tuple(blocks)))


class use_backend(ContextChoice):
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

    _variable = chosen

    def __init__(self, name: str):
        self.name = checked_backend(name)
        super().__init__(self.name)
