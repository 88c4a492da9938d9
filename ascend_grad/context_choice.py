"""The choice of a backend for several calls, and `ContextChoice`, the base class of such choices."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self

from ._dispatch import backend_choice, checked_backend


class _Block(NamedTuple):
    """An open ``with`` block of a `ContextChoice`."""

    owner: ContextChoice
    outer: Any  # the value to restore at its end


class _Choice(NamedTuple):
    """The choice of a context (thread or task). It is replaced, never changed, as copies of the context share it."""

    value: Any = None
    #: The object whose creation made this choice, and the value before, which its block restores if entered now.
    made_by: ContextChoice | None = None
    before: Any = None
    blocks: tuple[_Block, ...] = ()  # innermost last


class ContextChoice:
    """A choice that takes effect immediately and lasts, or is undone at the end of a ``with`` block."""

    #: Context variable with a `_Choice` or None.
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
            raise RuntimeError(f"{name}: expected an open `with` block of it in this thread or task, got none")
        outer = blocks.pop(place).outer
        if place == len(blocks):
            self._variable.set(_Choice(outer, blocks=tuple(blocks)))
            return
        # A block that was entered later is still open, for example a generator's. It will restore this block's value.
        blocks[place] = blocks[place]._replace(outer=outer)
        self._variable.set(choice._replace(blocks=tuple(blocks)))


class use_backend(ContextChoice):
    """Choose the backend of the following calls in this context (thread or task).

    ``ag.use_backend("cpu")`` takes effect immediately and lasts; at the end of a ``with`` block it is undone.

    Parameters
    ----------
    name : {"auto", "cpu", "npu", "reference"}
        The backend; ``"auto"`` also overrides the environment's choice. A backend that this machine lacks is refused by
        the calls that follow.

    Raises
    ------
    ParamInvalidError
        161002, if there is no backend of that name (not a str: its subclass `ParamTypeError`).
    RuntimeError
        A block ends that was not entered in this context.

    Notes
    -----
    One object may be entered any number of times, nested and in several threads or tasks at once. A task or thread that
    starts with a copy of the context starts with its choice. A generator has no separate context: a block that is open
    while it yields also holds for the code that iterates over it.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> with ag.use_backend("reference"):
    ...     ag.explain("softmax", [1.0, 2.0]).backend
    'reference'
    """

    _variable = backend_choice

    def __init__(self, name: str):
        self.name = checked_backend(name, "use_backend", "name")
        super().__init__(self.name)
