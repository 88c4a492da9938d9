"""Signatures and documentation of functions with options of losses, from the one list of options.

The functions for NumPy name all options in their signatures. Those for other libraries take ``**options``: `options_of`
gives their names and defaults, `with_options` the signature that `inspect.signature` shows, and `completed` the values
of a call.

A docstring has a line ``.. options::`` among its parameters, instead of which it gets the entries of all options of the
function that have no other line. With names of options after the colons, it gets the entries of these; with
``as in `function```, one entry of the others that refers to this function.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .options import NAMES, NUMBER, NUMBER_OR_PER_ROW, OPTIONS, OUTPUTS, PER_CLASS, PER_ROW, PER_TARGET

_LINE = re.compile(r"^( *)\.\. options::(.*)$", re.MULTILINE)
_Function = TypeVar("_Function", bound=Callable)


class Words(NamedTuple):
    """Words of a library for the types and shapes of options."""

    array: str = "array_like"
    number: str = "float"
    rows: str = ", shape (BT,)"
    classes: str = ", shape (V,)"
    targets: str = ", shape (BT, K)"


NUMPY = Words()


def options_of(*, of_logits: bool = False, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of the loss of a linear layer, or of the loss of logits, with their defaults.

    `without` names options that a function has as other parameters, or does not have.
    """
    return {
        option.name: option.default
        for option in OPTIONS.values()
        if (option.of_logits or not of_logits) and option.name not in without
    }


def options_like(function: Callable, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of a function for NumPy with their defaults, the general ones such as `backend` among them."""
    from inspect import Parameter, signature

    return {
        each.name: each.default
        for each in signature(function).parameters.values()
        if each.kind is Parameter.KEYWORD_ONLY and each.name not in without
    }


def completed(options: Mapping[str, Any], defaults: dict[str, Any], function: str) -> dict[str, Any]:
    """Return the options of a call, the defaults among them. An unknown name is Python's error of this function."""
    values = {**defaults, **options}
    if len(values) > len(defaults):
        name = next(each for each in options if each not in defaults)
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return values


def with_options(defaults: Mapping[str, Any], words: Words = NUMPY, **names: str) -> Callable[[_Function], _Function]:
    """Return a decorator that replaces ``**options`` in a signature by these options, and documents them.

    `names` has other names of options.
    """
    from inspect import Parameter, signature

    def fill(function: Any) -> Any:
        of_function = signature(function)
        own = [each for each in of_function.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        first = [name for name in _with_entries(function) if name in defaults]  # as in the docstring
        further = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name])
            for name in dict.fromkeys([*first, *defaults])
        ]
        function.__signature__ = of_function.replace(parameters=own + further)
        return _filled_in(function, tuple(defaults), words, names)

    return fill


def documented(words: Words = NUMPY, **names: str) -> Callable[[_Function], _Function]:
    """Return a decorator that fills in the entries of options. `names` has other names of options."""

    def fill(function: Any) -> Any:
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return _filled_in(function, tuple(name for name in parameters if name in OPTIONS), words, names)

    return fill


def _with_entries(function: Any) -> list[str]:
    """Return the options that a docstring names in its lines, which have entries of their own."""
    lines = _LINE.findall(function.__doc__ or "")
    return [name for _, which in lines if not which.strip().startswith("as in ") for name in which.split()]


def _filled_in(function: Any, options: tuple[str, ...], words: Words, names: dict[str, str]) -> Any:
    documented_here = _with_entries(function)

    def entries(match: re.Match) -> str:
        which = match[2].strip()
        if which.startswith("as in "):
            others = (names.get(name, name) for name in options if name not in documented_here)
            text = f"{', '.join(others)}\n    A{which[1:]}."
        else:
            of_all = [name for name in options if name not in documented_here]
            text = "\n".join(_entry(name, words, names) for name in which.split() or of_all)
        return textwrap.indent(text, match[1])

    if function.__doc__ is not None:  # python -OO removes docstrings
        function.__doc__ = _LINE.sub(entries, function.__doc__)
    return function


def _entry(name: str, words: Words, names: dict[str, str]) -> str:
    """Return the entry of an option as numpydoc has it."""
    option = OPTIONS[name]
    outputs = ", ".join(f'"{each}"' for each in OUTPUTS)
    kinds = {
        NUMBER: words.number,
        PER_ROW: words.array + words.rows,
        PER_CLASS: words.array + words.classes,
        PER_TARGET: f"0 or {words.array}{words.targets}",
        NUMBER_OR_PER_ROW: f"{words.number} or {words.array}{words.rows}",
        NAMES: f"sequence of {{{outputs}}}",
    }
    default = "optional" if option.default is None else f"default {option.default}"
    text = option.text
    if option.kind in (PER_ROW, PER_CLASS, PER_TARGET):
        text += " Of any of the four dtypes."
    lines = textwrap.wrap(text, 108)
    return "\n".join([f"{names.get(name, name)} : {kinds[option.kind]}, {default}", *(f"    {line}" for line in lines)])
