"""Writing of figures to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure without a date and random identifiers, so that equal results give equal files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ascend_grad", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
