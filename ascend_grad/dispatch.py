"""The choice of a backend that outlasts a call."""

from __future__ import annotations

from typing import NamedTuple

from ._dispatch import checked_backend, chosen


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
        self.name = checked_backend(name)
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
