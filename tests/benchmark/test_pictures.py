"""Test that the committed pictures show the stored results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ascend_grad.bench import documents, pictures
from ascend_grad.bench.case import Case
from ascend_grad.bench.results import OWN, Growth, Results

SOURCES = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drawn():
    return pictures.pictures(SOURCES / "bench" / "results")


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_the_committed_picture_is_current(name, drawn):
    """``python -m ascend_grad.bench.pictures`` draws it again."""
    ElementTree.fromstring(drawn[name])
    committed = SOURCES / pictures.PICTURES.relative_to(documents.ROOT) / f"{name}.svg"
    assert committed.read_text(encoding="utf-8") == drawn[name]


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_nothing_is_drawn_outside_of_the_picture(name, drawn):
    root = ElementTree.fromstring(drawn[name])
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root:
        kind = element.tag.rpartition("}")[2]
        if kind in ("text", "rect"):
            x, y = (float(element.get(each)) for each in ("x", "y"))
            assert x >= 0
            assert x + float(element.get("width", 0)) <= width
            assert y + float(element.get("height", 0)) <= height


def test_bars_of_memory_are_as_long_as_the_memory():
    growths = [Growth(case, OWN, 2**30, 2**30) for case in pictures.CASES]
    text = pictures.memory_by_vocabulary({"memory": Results({}, 1, {"memory": growths})})
    lengths = {float(length) for length in re.findall(r'class="own" x="265.0" y="\d+" width="([\d.]+)"', text)}
    assert lengths == {(pictures.WIDTH - pictures.LEFT - pictures.RIGHT) / pictures.LARGEST_MEMORY}


def test_the_memory_of_one_side_is_measured(monkeypatch):
    case = Case(pictures.WHOLE, "float32", (64, 300, 16), "loss and gradients")
    monkeypatch.setattr(pictures, "CASES", [case])
    (growth,) = pictures.measured_memory()["memory"]
    assert (growth.case, growth.side) == (case, OWN)
    assert 0 < growth.promise < 2**23
