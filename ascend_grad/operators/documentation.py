"""Documentation of options, which the docstrings of all functions with these options share.

A docstring has a line ``.. options:: temperature softcap`` among its parameters. `documented` replaces it by the
entries of these options.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .options import NAMES, NUMBER, NUMBER_OR_PER_ROW, OPTIONS, OUTPUTS, PER_CLASS, PER_ROW, PER_TARGET

_LINE = re.compile(r"^( *)\.\. options:: (.+)$", re.MULTILINE)
_Function = TypeVar("_Function", bound=Callable)


class Words(NamedTuple):
    """Words of a library for the types and shapes of options."""

    array: str = "array_like"
    number: str = "float"
    rows: str = ", shape (BT,)"
    classes: str = ", shape (V,)"
    targets: str = ", shape (BT, K)"


NUMPY = Words()


def _entry(name: str, words: Words, names: dict[str, str]) -> str:
    """Return the entry of an option as numpydoc has it."""
    option = OPTIONS[name]
    outputs = ", ".join(f'"{each}"' for each in OUTPUTS)
    kinds = {
        NUMBER: words.number,
        PER_ROW: words.array + words.rows,
        PER_CLASS: words.array + words.classes,
        PER_TARGET: words.array + words.targets,
        NUMBER_OR_PER_ROW: f"{words.number} or {words.array}{words.rows}",
        NAMES: f"sequence of {{{outputs}}}",
    }
    default = "optional" if option.default is None else f"default {option.default}"
    text = option.text
    if option.kind in (PER_ROW, PER_CLASS, PER_TARGET):
        text += " Of any of the four dtypes."
    lines = textwrap.wrap(text, 108)
    return "\n".join([f"{names.get(name, name)} : {kinds[option.kind]}, {default}", *(f"    {line}" for line in lines)])


def documented(words: Words = NUMPY, **names: str) -> Callable[[_Function], _Function]:
    """Return a decorator that fills in the entries of options. `names` has other names of options."""

    def entries(match: re.Match) -> str:
        text = "\n".join(_entry(name, words, names) for name in match[2].split())
        return textwrap.indent(text, match[1])

    def fill(function: Any) -> Any:
        if function.__doc__ is not None:  # python -OO removes docstrings
            function.__doc__ = _LINE.sub(entries, function.__doc__)
        return function

    return fill
