"""Test what `help` shows of every public function: first a sentence and a call, then the parameters by group."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import get_type_hints

import pytest

from ascend_grad.context_choice import ContextChoice
from ascend_grad.operators.options import GROUPS, OPTIONS, OUTPUT_GRADIENTS, by_group

OPTIONAL = ("dask", "jax", "torch")


def _doors() -> Iterator[ModuleType]:
    """Yield the modules with public functions whose packages are installed."""
    for name in ("", ".npu", ".objectives", ".parallel", *(f".{each}" for each in OPTIONAL if find_spec(each))):
        module = importlib.import_module(f"ascend_grad{name}")
        yield module
        if name == ".torch":
            yield from (getattr(module.compat, each) for each in module.compat.__all__)


DOORS = {module.__name__: module for module in _doors()}
VERBS = {"Choose", "Compute", "Copy", "Free", "Print", "Return", "Set", "Submit", "Wait"}


def _functions(module: ModuleType) -> Iterator[tuple[str, Callable]]:
    """Yield the public functions of a module, and the functions `apply` of its classes."""
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isfunction(found) or (isinstance(found, type) and issubclass(found, ContextChoice)):
            yield name, found
        elif isinstance(found, type) and isinstance(vars(found).get("apply"), staticmethod):
            yield f"{name}.apply", found.apply


FUNCTIONS = {f"{door}.{name}": each for door, module in DOORS.items() for name, each in _functions(module)}
EVERY = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def _first_text(function: Callable) -> str:
    """Return the documentation before the parameters."""
    doc = inspect.getdoc(function)
    assert doc is not None
    return doc.partition("\nParameters\n---")[0]


def _documented(function: Callable, title: str) -> list[str]:
    """Return the names of the parameters in one section, in order."""
    doc = inspect.getdoc(function) or ""
    section = re.search(rf"^{title}\n-+\n((?:(?!.+\n-+\n).*\n)*)", doc, re.MULTILINE)
    heads = re.findall(r"^\S.*?(?= : |$)", section[1], re.MULTILINE) if section else []
    return [name.lstrip("*") for head in heads for name in head.split(", ")]


def test_functions_of_every_kind_are_tested():
    assert {"ascend_grad.softmax", "ascend_grad.use_backend", "ascend_grad.npu.stream"} <= set(FUNCTIONS)
    if find_spec("torch"):
        assert "ascend_grad.torch.compat.verl.LinearCrossEntropy.apply" in FUNCTIONS


@EVERY
def test_the_first_sentence_begins_with_a_verb(function: Callable):
    first, *following = _first_text(function).splitlines()
    assert first.split()[0] in VERBS
    assert first.endswith(".")
    assert not any(following[:1])


@EVERY
def test_a_call_comes_before_the_parameters(function: Callable):
    assert re.search(rf"\b{function.__name__}\(", _first_text(function))


@EVERY
def test_the_text_before_the_parameters_is_plain(function: Callable):
    text = _first_text(function)
    assert ":math:" not in text
    assert ".. math::" not in text
    assert "\\" not in text


@EVERY
def test_parameters_are_in_the_order_of_the_groups(function: Callable):
    """Positional parameters have the order of a call. Parameters of the last group have a separate section."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    groups = by_group(keywords)
    assert keywords == [name for names in groups.values() for name in names]
    first, last = _documented(function, "Parameters"), _documented(function, "Other Parameters")
    assert first + last == [each.name for each in parameters]
    assert last == groups["memory and threads"]


@EVERY
def test_the_groups_are_named(function: Callable):
    """The text names the first and the last parameter of each group, if there are outputs or gradients."""
    parameters = inspect.signature(function).parameters.values()
    groups = by_group(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    found = re.search(r"The parameters are grouped: ([^.]*)\.", _first_text(function))
    assert (found is not None) == bool(groups["outputs"] + groups["gradients"])
    if found is not None:
        named = re.findall(r"([a-z ]+) \(([^)]*)\)", " ".join(found[1].split()))
        titles = list(GROUPS)
        numbers = [titles.index(title.strip()) for title, _ in named]
        assert numbers == sorted(set(numbers))
        ends = [name for _, names in named for name in re.findall(r"`(\w+)`", names)]
        documented = _documented(function, "Parameters") + _documented(function, "Other Parameters")
        assert ends == sorted(ends, key=documented.index)
        assert (ends[0], ends[-1]) == (documented[0], documented[-1])


@pytest.mark.parametrize("name", importlib.import_module("ascend_grad").__all__)
def test_type_hints_can_be_evaluated(name: str):
    """Tools that check arguments while a program runs evaluate the annotations of NumPy's functions."""
    found = getattr(importlib.import_module("ascend_grad"), name)
    if inspect.isfunction(found):
        assert "return" in get_type_hints(found)


def test_options_describe_the_loss():
    groups = by_group([*OPTIONS, *OUTPUT_GRADIENTS])
    assert groups == {
        "loss": [name for name in OPTIONS if name != "outputs"],
        "outputs": ["outputs"],
        "gradients": list(OUTPUT_GRADIENTS),
        "memory and threads": [],
    }


@pytest.mark.parametrize("name", [name for name in ("parallel", *OPTIONAL) if f"ascend_grad.{name}" in DOORS])
def test_help_of_a_module_shows_a_loss(name: str):
    lines = (DOORS[f"ascend_grad.{name}"].__doc__ or "").splitlines()
    assert any(".cross_entropy" in line or "linear_cross_entropy(" in line for line in lines[:10])
