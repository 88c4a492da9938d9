"""How pictures are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: str | Path) -> None:
    """Without a date and random identifiers: the same results give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ascend_grad", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
