"""The picture of the first page: six jobs in bars, drawn from the stored results, for light and dark themes.

``python -m ascend_grad.bench.front_picture`` draws it into the documents again, after new measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from .documents import DOCS
from .results import FOLDER, NUMPY, TORCH, Results, Row

PATH = DOCS / "pictures" / "speed.svg"


class Job(NamedTuple):
    """A job that a reader recognises, and its case in the results."""

    title: str
    detail: str
    file: str
    section: str
    case: str


JOBS = (
    Job(
        "Classifier: loss and gradient",
        "4096 × 1000 logits",
        "losses",
        "logits",
        "cross_entropy float32 (4096, 1000) dim 1, C order, fresh",
    ),
    Job(
        "Language model: loss and gradient",
        "1024 × 32,000 logits",
        "losses",
        "logits",
        "cross_entropy float32 (1024, 32000) dim 1, C order, fresh",
    ),
    Job(
        "Segmentation: loss and gradient",
        "16 × 21 × 64 × 64, axis 1",
        "losses",
        "logits",
        "cross_entropy float32 (16, 21, 64, 64) dim 1, C order, fresh",
    ),
    Job("Softmax", "4096 × 4096", "speed", "speed", "softmax float32 4096 × 4096 out"),
    Job("Softmax gradient", "1,000,000 × 3", "speed", "speed", "softmax_backward float32 1000000 × 3 out"),
    Job("Softmax gradient", "4096 × 4096", "speed", "speed", "softmax_backward float32 4096 × 4096 out"),
)

WIDTH, LEFT, RIGHT, TOP, ROW = 800, 265, 60, 62, 44
BAR = 14
#: The bars end at this ratio. Their axis is logarithmic.
LARGEST = 20
TICKS = (1, 2, 5, 10, 20)
STYLE = """
text { font: 13px sans-serif; fill: #1f2328; } .detail, .tick { font-size: 11px; fill: #59636e; }
.numpy { fill: #7a9cc6; } .torch { fill: #e07a3f; } line { stroke: #d1d9e0; } .one { stroke: #1f2328; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .detail, .tick { fill: #9198a1; } line { stroke: #3d444d; } .one { stroke: #f0f6fc; }
}
"""


def row_of(job: Job, results: Mapping[str, Results]) -> Row:
    """Return the measured row of a job."""
    return next(row for row in results[job.file][job.section] if row.case.name == job.case)


def picture(results: Mapping[str, Results]) -> str:
    """Return the picture as SVG."""
    height = TOP + ROW * len(JOBS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Speed-up over NumPy and PyTorch for six jobs (higher is better)</title>",
        f"<style>{STYLE}</style>",
        _text(LEFT, 20, "Speed-up over a rival (higher is better), float32, two cores"),
        f'<rect class="numpy" x="{LEFT}" y="32" width="{BAR}" height="{BAR}"/>',
        _text(LEFT + 20, 44, "NumPy"),
        f'<rect class="torch" x="{LEFT + 90}" y="32" width="{BAR}" height="{BAR}"/>',
        _text(LEFT + 110, 44, "PyTorch"),
    ]
    bottom = TOP + ROW * len(JOBS)
    for tick in TICKS:
        kind = ' class="one"' if tick == 1 else ""
        parts.append(f'<line{kind} x1="{_x(tick)}" y1="{TOP - 8}" x2="{_x(tick)}" y2="{bottom}"/>')
        parts.append(_text(_x(tick), bottom + 16, f"{tick}×", "tick", "middle"))
    for number, job in enumerate(JOBS):
        y = TOP + ROW * number
        parts += [
            _text(LEFT - 10, y + 14, job.title, anchor="end"),
            _text(LEFT - 10, y + 29, job.detail, "detail", "end"),
        ]
        for place, (kind, sides) in enumerate((("numpy", NUMPY), ("torch", TORCH))):
            ratio = row_of(job, results).speedup(*sides)
            assert ratio is not None, f"{job.case} has no time of {kind}"
            x, top = _x(ratio), y + 1 + place * (BAR + 2)
            parts.append(f'<rect class="{kind}" x="{_x(1)}" y="{top}" width="{x - _x(1):.1f}" height="{BAR}"/>')
            parts.append(_text(x + 5, top + 12, f"{ratio:.1f}×", "detail"))
    return "\n".join([*parts, "</svg>", ""])


def _x(ratio: float) -> float:
    share = math.log(max(ratio, 0.9) / 0.9) / math.log(LARGEST / 0.9)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}"{marks}>{escape(words)}</text>'


def stored_results(folder: Path) -> dict[str, Results]:
    """Return the stored results that the picture shows, by the names of their files."""
    return {name: Results.from_json((folder / f"{name}.json").read_text()) for name in {job.file for job in JOBS}}


if __name__ == "__main__":
    PATH.write_text(picture(stored_results(FOLDER)))
