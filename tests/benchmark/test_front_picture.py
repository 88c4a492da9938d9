"""Test that the picture of the first page shows the stored results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from ascend_grad.bench import documents, front_picture

SOURCES = Path(__file__).resolve().parents[2]


def test_the_committed_picture_is_current():
    """``python -m ascend_grad.bench.front_picture`` draws it again."""
    drawn = front_picture.picture(front_picture.stored_results(SOURCES / "bench" / "results"))
    ElementTree.fromstring(drawn)
    assert (SOURCES / front_picture.PATH.relative_to(documents.ROOT)).read_text() == drawn
