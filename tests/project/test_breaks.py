"""Test that the deliberate breaks of ``breaks.py`` apply to the present sources."""

from __future__ import annotations

import pytest
from breaks import BREAKS
from broken import ROOT


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_applies(name):
    broken = BREAKS[name]
    assert broken.right in (ROOT / broken.file).read_text()
    assert broken.right != broken.wrong
    for test in broken.tests:
        assert (ROOT / test.split()[0]).exists()
