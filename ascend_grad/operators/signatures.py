"""Signatures and documentation of functions with options of losses, from the one list of options.

The functions for NumPy name all options in their signatures. Those for other libraries take ``**options``: `options_of`
gives their names and defaults, `with_options` the signature that `inspect.signature` shows, and `completed` the values
of a call.

A docstring has a line ``.. options::`` among its parameters, instead of which it gets the entries of all options of the
function that have no other line. With names of options after the colons, it gets the entries of these; with
``as in `function```, one entry of the others that refers to this function.

A function that is `like` another one documents what differs: parameters and exceptions without an entry have the other
function's, and so has the section Returns. The `Words` of a library may have other exceptions. Without a call of the
function before the sections, the other function's text and call follow the first line.

Parameters are in groups (`options.GROUPS`). Parameters of the last group are in the section Other Parameters.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from .options import (
    LAYER_OUTPUTS,
    NAMES,
    NUMBER,
    NUMBER_OR_PER_ROW,
    OPTIONS,
    PER_CLASS,
    PER_ROW,
    PER_TARGET,
    by_group,
)

_LINE = re.compile(r"^( *)\.\. options::(.*)$", re.MULTILINE)
_TITLES = "Parameters", "Returns", "Other Parameters", "Raises", "Notes", "Examples"
_TITLE = re.compile(rf"^({'|'.join(_TITLES)})\n-+\n", re.MULTILINE)
_LINE_BELOW_TITLE = re.compile(r"\n( +)---")
_ENTRY = re.compile(r"^(\S.*)\n((?: .*\n)+)", re.MULTILINE)
_MODULE = re.compile(r"\bag[tjd]?\.")
_GROUPS = "The parameters are grouped: "
_Function = TypeVar("_Function", bound=Callable)


class Words(NamedTuple):
    """Words of a library for the types and shapes of options."""

    array: str = "array_like"
    number: str = "float"
    rows: str = ", shape (BT,)"
    classes: str = ", shape (V,)"
    targets: str = ", shape (BT, K)"
    #: Exceptions, as in the section Raises.
    errors: str = ""
    #: Parameters that differ from those for NumPy, as in the section Parameters.
    parameters: str = ""
    #: The name of the module in calls.
    module: str = "ag"
    #: The names of the loss's outputs.
    outputs: tuple[str, ...] = tuple(LAYER_OUTPUTS)


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
        from difflib import get_close_matches

        name = next(each for each in options if each not in defaults)
        message = f"{function}() got an unexpected keyword argument {name!r}"
        close = get_close_matches(name, defaults, 1, 0.8) or [each for each in defaults if each.endswith(f"_{name}")]
        raise TypeError(f"{message}. Did you mean {' or '.join(map(repr, sorted(close)))}?" if close else message)
    return values


def with_options(
    defaults: Mapping[str, Any], words: Words = NUMPY, like: Callable | None = None
) -> Callable[[_Function], _Function]:
    """Return a decorator that replaces ``**options`` in a signature by these options, and documents them.

    `like` is a function that documents the rest.
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
        given = {each.name: each for each in own + further}
        parameters = [name for names in by_group(given).values() for name in names]
        function.__signature__ = of_function.replace(parameters=[given[name] for name in parameters])
        _fill_in(function, tuple(defaults), words)
        return _completed_like(function, parameters, words, like)

    return fill


def documented(words: Words = NUMPY, like: Callable | None = None) -> Callable[[_Function], _Function]:
    """Return a decorator that fills in the entries of options, and what the docstring of the function `like` has."""

    def fill(function: Any) -> Any:
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        _fill_in(function, tuple(name for name in parameters if name in OPTIONS), words)
        return _completed_like(function, parameters, words, like)

    return fill


def _with_entries(function: Any) -> list[str]:
    """Return the options that a docstring names in its lines; each has a separate entry."""
    lines = _LINE.findall(function.__doc__ or "")
    return [name for _, which in lines if not which.strip().startswith("as in ") for name in which.split()]


def _fill_in(function: Any, options: tuple[str, ...], words: Words) -> None:
    documented_here = _with_entries(function)

    def entries(match: re.Match) -> str:
        which = match[2].strip()
        others = [name for name in options if name not in documented_here]
        if which.startswith("as in "):
            text = f"{', '.join(others)}\n    A{which[1:]}."
        else:
            text = "\n".join(_entry(name, words) for name in which.split() or others)
        return textwrap.indent(text, match[1])

    if function.__doc__ is not None:  # python -OO removes docstrings
        function.__doc__ = _LINE.sub(entries, function.__doc__)


def _completed_like(function: Any, parameters: Sequence[str], words: Words, like: Callable | None) -> Any:
    """Complete a docstring by text, parameters, results and exceptions of the docstring of another function."""
    if like is None or function.__doc__ is None or like.__doc__ is None:
        return function
    own, other = _sections(function.__doc__), _sections(like.__doc__)
    if f"{function.__name__}(" not in own[""]:
        first, _, further = own[""].partition("\n\n")
        text = other[""].partition("\n\n")[2].partition(_GROUPS)[0].rstrip()
        text = _MODULE.sub(f"{words.module}.", text).replace(f"{like.__name__}(", f"{function.__name__}(")
        own[""] = f"{first.rstrip()}\n\n{text}\n\n{further}"
    groups = by_group(parameters)
    ends = {title: dict.fromkeys((f"`{names[0]}`", f"`{names[-1]}`")) for title, names in groups.items() if names}
    if len(ends) > 2:
        text = ", ".join(f"{title} ({' to '.join(names)})" for title, names in ends.items())
        own[""] = f"{own[''].rstrip()}\n\n{textwrap.fill(_GROUPS + text, 116)}."
    own_entries = _entries(own.get("Parameters", ""))
    other_entries = _entries(other["Parameters"] + other.get("Other Parameters", "")) | _entries(words.parameters)
    names_of: dict[tuple[str, str, str], list[str]] = {}  # by section, type and text, which several may share
    for name in parameters:
        kind, text = own_entries.get(name) or other_entries[name]
        if name not in own_entries:
            kind = kind.replace("array_like", words.array)
        title = "Other Parameters" if name in groups["memory and threads"] else "Parameters"
        names_of.setdefault((title, kind, text), []).append(name)
    own["Parameters"] = ""
    for (title, kind, text), names in names_of.items():
        own[title] = own.get(title, "") + f"{', '.join(names)}{kind}\n{text}"
    own.setdefault("Returns", other["Returns"].replace("ndarray", words.array.replace("array_like", "ndarray")))
    exceptions = _entries(words.errors or other["Raises"]) | _entries(own.get("Raises", ""))
    own["Raises"] = "".join(f"{name}\n{text}" for name, (_, text) in exceptions.items())
    sections = [f"\n\n{title}\n{'-' * len(title)}\n{own[title].rstrip()}" for title in _TITLES if title in own]
    function.__doc__ = own[""].rstrip() + "".join(sections) + "\n"
    return function


def _sections(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by their titles, and the text before them by the empty string."""
    indent = _LINE_BELOW_TITLE.search(doc)
    first, *others = _TITLE.split(doc.replace("\n" + indent[1], "\n") if indent else doc)
    return {"": first, **dict(zip(others[::2], others[1::2]))}


@cache
def _entries(section: str) -> dict[str, tuple[str, str]]:
    """Return the type and the text of every parameter of a section."""
    entries: dict[str, tuple[str, str]] = {}
    for head, text in _ENTRY.findall(section):
        names, separator, kind = head.partition(" : ")
        entries |= dict.fromkeys(names.split(", "), (separator + kind, text))
    return entries


def _entry(name: str, words: Words) -> str:
    """Return the entry of an option as numpydoc has it."""
    option = OPTIONS[name]
    outputs = ", ".join(f'"{each}"' for each in words.outputs)
    kinds = {
        NUMBER: words.number,
        PER_ROW: words.array + words.rows,
        PER_CLASS: words.array + words.classes,
        PER_TARGET: f"0 or {words.array}{words.targets}",
        NUMBER_OR_PER_ROW: f"{words.number} or {words.array}{words.rows}",
        NAMES: f"sequence of {{{outputs}}}",
    }
    default = "optional" if option.default is None else f"default {option.default}"
    return f"{name} : {kinds[option.kind]}, {default}\n{_text(name)}"


@cache
def _text(name: str) -> str:
    text = OPTIONS[name].text
    if OPTIONS[name].is_array:
        text += " Of any of the four dtypes."
    return textwrap.indent(textwrap.fill(text, 108), "    ")
