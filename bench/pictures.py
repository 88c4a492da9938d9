"""The committed pictures of the documents, for light and dark themes: speed, memory, and the way of a call.

``python -m ascend_grad.bench.pictures`` draws them into the documents again, from the stored results. ``--measure``
first measures the memory of losses, for less than a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import ascend_grad as ag

from . import machine
from .case import WHOLE, Case
from .documents import ROOT, kept_grids
from .measure import memory
from .results import FOLDER, NUMPY, OWN, SKLEARN, TORCH, Results, Row

PICTURES = ROOT / "docs" / "pictures"
#: The file with the measured memory of the cases below, in the folder of the results.
MEMORY = "memory"
#: The beginning of the names under which the results of random problems are drawn.
GRID = "grid"
#: The rivals of the pictures of speed: the class of their marks, and their names.
RIVALS = (("numpy", "NumPy"), ("torch", "PyTorch"))
#: The file of fits, and section of its results; the class of the marks of each dtype.
FIT = "fit"
FITTED = (("numpy", "float64"), ("torch", "float32"))
TOKENS, FEATURES = 4096, 1024
VOCABULARIES = (10_000, 50_000, 100_000, 150_000)
CASES = [Case(WHOLE, "float32", (TOKENS, vocabulary, FEATURES), "loss and gradients") for vocabulary in VOCABULARIES]


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
#: The bars of speed end at this ratio. Their axis is logarithmic.
LARGEST = 20
TICKS = (1, 2, 5, 10, 20)
#: The bars of memory end at this number of GiB.
LARGEST_MEMORY = 2.5
MEMORY_TICKS = (0, 0.5, 1, 1.5, 2, 2.5)
STYLE = """
text { font: 13px sans-serif; fill: #1f2328; } .detail, .tick { font-size: 11px; fill: #59636e; }
.numpy, .own { fill: #7a9cc6; } .torch, .logits { fill: #e07a3f; } line { stroke: #d1d9e0; } .one { stroke: #1f2328; }
.box { fill: none; stroke: #7a9cc6; } .head { fill: #59636e; } .arrow { stroke: #59636e; }
.dots { fill: none; stroke-width: 4; stroke-linecap: round; opacity: 0.6; }
.dots.numpy { stroke: #7a9cc6; } .dots.torch { stroke: #e07a3f; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .detail, .tick { fill: #9198a1; } line { stroke: #3d444d; } .one { stroke: #f0f6fc; }
  .head { fill: #9198a1; } .arrow { stroke: #9198a1; }
}
"""


#: The ends of the axes of random problems: ratios, and sizes of each panel.
RATIOS, RATIO_TICKS = (0.5, 200), (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
PANEL_HEIGHT, PANEL_GAP = 260, 40


class Panel(NamedTuple):
    """The random problems of one family: a section of the results, and powers of ten between which sizes are drawn."""

    title: str
    section: str
    powers: tuple[int, ...]


PANELS = (
    Panel("row-wise operators, by elements", "rowwise", (0, 2, 4, 6, 7)),
    Panel("linear operators, by BT × V × H", "linear", (0, 3, 6, 9, 11)),
)


class Box(NamedTuple):
    """A step of a call: where its box begins, its width, its title, a line of details, and the steps that follow."""

    x: int
    y: int
    width: int
    title: str
    detail: str
    next: tuple[int, ...] = ()


BOX_HEIGHT = 48
#: The way of a call from the public function to the arithmetic.
BOXES = (
    Box(160, 36, 480, "Public function", "softmax, cross_entropy, linear_cross_entropy, ...", (1,)),
    Box(160, 114, 480, "Contract", "checks arguments, shapes, dtypes and values before anything is written", (2,)),
    Box(160, 192, 480, "Dispatch", "backend=, use_backend, ASCEND_GRAD_BACKEND; explain() tells why", (3, 4, 5)),
    Box(20, 284, 310, "Backend cpu", "plan, workspace, tasks for a team of threads (Cython)", (6,)),
    Box(350, 284, 240, "Backend npu", "copies, streams, repairs of quirks", (7,)),
    Box(610, 284, 170, "Backend reference", "NumPy in float64"),
    Box(20, 362, 310, "Kernel of the CPU variant (C)", "baseline, AVX2, AVX-512, AMX, NEON, BFMMLA"),
    Box(350, 362, 240, "Operator of the device", "aclnn... of CANN, opened at run time"),
)


def row_of(job: Job, results: Mapping[str, Results]) -> Row:
    """Return the measured row of a job."""
    return next(row for row in results[job.file][job.section] if row.case.name == job.case)


def speed(results: Mapping[str, Results]) -> str:
    """Draw the speed-up of six jobs over NumPy and PyTorch."""
    bottom = TOP + ROW * len(JOBS)
    parts = [
        _text(LEFT, 20, "Speed-up over a rival (higher is better), float32, two cores"),
        *_legend(*RIVALS),
        *_axis(((_x(tick), f"{tick}×", tick == 1) for tick in TICKS), bottom),
    ]
    for number, job in enumerate(JOBS):
        ratios = []
        for (kind, _), sides in zip(RIVALS, (NUMPY, TORCH)):
            ratio = row_of(job, results).speedup(*sides)
            assert ratio is not None, f"{job.case} has no time of {kind}"
            ratios.append((kind, _x(ratio), f"{ratio:.1f}×"))
        parts += _bars(number, job.title, job.detail, _x(1), ratios)
    return _svg("Speed-up over NumPy and PyTorch for six jobs (higher is better)", bottom + 30, parts)


def fits(results: Mapping[str, Results]) -> str:
    """Draw the speed-up of `SoftmaxRegression` over `LogisticRegression`, by the shape of the data and by dtype."""
    shapes: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in results[FIT][FIT]:
        if row.speedup(*SKLEARN) is not None:
            shapes.setdefault(row.case.shape, {})[row.case.dtype] = row
    bottom, ticks = TOP + ROW * len(shapes), (1, 2, 5, 10)
    parts = [
        _text(LEFT, 20, "Speed-up of a fit over LogisticRegression (higher is better), one thread"),
        *_legend(*FITTED),
        *_axis(((_x(tick), f"{tick}×", tick == 1) for tick in ticks), bottom),
    ]
    for number, (shape, rows) in enumerate(shapes.items()):
        samples, classes, features = shape
        bars = [(kind, ratio) for kind, dtype in FITTED if (ratio := rows[dtype].speedup(*SKLEARN)) is not None]
        title, detail = f"{samples:,} samples", f"{classes} classes, {features} features"
        parts += _bars(number, title, detail, _x(1), [(kind, _x(ratio), f"{ratio:.1f}×") for kind, ratio in bars])
    return _svg("Speed-up of SoftmaxRegression over LogisticRegression (higher is better)", bottom + 30, parts)


def memory_by_vocabulary(results: Mapping[str, Results]) -> str:
    """Draw the measured memory of a loss over vocabularies, and the bytes of its logits."""
    bottom = TOP + ROW * len(CASES)
    parts = [
        _text(LEFT, 20, f"Memory beyond the results (lower is better), {TOKENS} tokens, {FEATURES} features, float32"),
        *_legend(("logits", "all logits"), ("own", "ascend_grad, measured")),
        *_axis(((_memory_x(tick), f"{tick:g} GiB", tick == 0) for tick in MEMORY_TICKS), bottom),
    ]
    measured = {growth.case: growth.bytes for growth in results[MEMORY]["memory"] if growth.side == OWN}
    for number, case in enumerate(CASES):
        sizes = (("logits", 4 * math.prod(case.shape[:2]) / 2**30), ("own", measured[case] / 2**30))
        bars = [(kind, _memory_x(size), f"{size:.2f} GiB") for kind, size in sizes]
        parts += _bars(number, f"vocabulary {case.shape[1]:,}", "loss and both gradients", _memory_x(0), bars)
    return _svg("Memory of a loss over a vocabulary, compared with the size of its logits", bottom + 30, parts)


def random_problems(results: Mapping[str, Results]) -> str:
    """Draw a point for every random problem and rival: the speed-up over the size of the problem."""
    bottom, left = TOP + PANEL_HEIGHT, 50
    width = (WIDTH - left - PANEL_GAP - 10) / len(PANELS)
    grids = [grid for name, grid in sorted(results.items()) if name.startswith(GRID)]
    parts = [_text(left, 20, "Speed-up over a rival (higher is better), two cores"), *_legend(*RIVALS, left=left)]
    for number, panel in enumerate(PANELS):
        start = left + number * (width + PANEL_GAP)
        for tick in RATIO_TICKS:
            y, kind = _place(tick, RATIOS, bottom, TOP), ' class="one"' if tick == 1 else ""
            parts.append(f'<line{kind} x1="{start:g}" y1="{y:g}" x2="{start + width:g}" y2="{y:g}"/>')
            parts.append(_text(start - 5, y + 4, f"{tick:g}×", "tick", "end"))
        sizes = (10.0 ** panel.powers[0], 10.0 ** panel.powers[-1])
        ticks = [(power, _place(10.0**power, sizes, start, start + width)) for power in panel.powers]
        parts += [_text(x, bottom + 16, f"1e{power}", "tick", "middle") for power, x in ticks]
        parts.append(_text(start + width / 2, bottom + 34, panel.title, "detail", "middle"))
        for (kind, _), sides in zip(RIVALS, (NUMPY, TORCH)):
            places = [
                (_place(math.prod(row.case.shape), sizes, start, start + width), _place(ratio, RATIOS, bottom, TOP))
                for grid in grids
                for row in grid[panel.section]
                if (ratio := row.speedup(*sides)) is not None
            ]
            parts.append(f'<path class="dots {kind}" d="{"".join(f"M{x:g} {y:g}h0" for x, y in places)}"/>')
    return _svg("Speed-up over NumPy and PyTorch for random problems (higher is better)", bottom + 44, parts)


def way_of_a_call(_: Mapping[str, Results]) -> str:
    """Draw how a call flows from the public function to the arithmetic."""
    parts = [_text(WIDTH / 2, 20, "How a call flows", anchor="middle")]
    for box in BOXES:
        middle, bottom = box.x + box.width / 2, box.y + BOX_HEIGHT
        parts += [
            f'<rect class="box" x="{box.x}" y="{box.y}" width="{box.width}" height="{BOX_HEIGHT}" rx="6"/>',
            _text(middle, box.y + 20, box.title, anchor="middle"),
            _text(middle, box.y + 38, box.detail, "detail", "middle"),
        ]
        for each in box.next:
            x, y = BOXES[each].x + BOXES[each].width / 2, BOXES[each].y
            start = min(max(x, box.x + 40), box.x + box.width - 40)
            parts.append(f'<line class="arrow" x1="{start:g}" y1="{bottom}" x2="{x:g}" y2="{y - 6}"/>')
            parts.append(f'<polygon class="head" points="{x - 5:g},{y - 8} {x + 5:g},{y - 8} {x:g},{y}"/>')
    return _svg("How a call flows: public function, contract, dispatch, backend, kernel", 424, parts)


def _svg(title: str, height: float, parts: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _legend(*entries: tuple[str, str], left: int = LEFT) -> Iterator[str]:
    for place, (kind, words) in enumerate(entries):
        x = left + 90 * place
        yield f'<rect class="{kind}" x="{x}" y="32" width="{BAR}" height="{BAR}"/>'
        yield _text(x + 20, 44, words)


def _axis(ticks: Iterable[tuple[float, str, bool]], bottom: float) -> Iterator[str]:
    for x, words, is_origin in ticks:
        kind = ' class="one"' if is_origin else ""
        yield f'<line{kind} x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}"/>'
        yield _text(x, bottom + 16, words, "tick", "middle")


def _bars(number: int, title: str, detail: str, start: float, bars: list[tuple[str, float, str]]) -> Iterator[str]:
    """Draw a row of the picture: its two lines of text, and a bar for each kind up to a place on the axis."""
    y = TOP + ROW * number
    yield _text(LEFT - 10, y + 14, title, anchor="end")
    yield _text(LEFT - 10, y + 29, detail, "detail", "end")
    for place, (kind, x, words) in enumerate(bars):
        top = y + 1 + place * (BAR + 2)
        yield f'<rect class="{kind}" x="{start}" y="{top}" width="{x - start:.1f}" height="{BAR}"/>'
        yield _text(x + 5, top + 12, words, "detail")


def _x(ratio: float) -> float:
    share = math.log(max(ratio, 0.9) / 0.9) / math.log(LARGEST / 0.9)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)


def _place(value: float, ends: tuple[float, float], start: float, end: float) -> float:
    """Return the place of a value on a logarithmic axis. Values beyond its ends are drawn there."""
    low, high = ends
    share = math.log(min(max(value, low), high) / low) / math.log(high / low)
    return round(start + (end - start) * share, 1)


def _memory_x(size: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * size / LARGEST_MEMORY, 1)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}"{marks}>{escape(words)}</text>'


#: The functions that draw the pictures, by the names of their files.
DRAWN = {
    "speed": speed,
    "random": random_problems,
    "fit": fits,
    "memory": memory_by_vocabulary,
    "call": way_of_a_call,
}


def stored_results(folder: Path) -> dict[str, Results]:
    """Return the stored results that the pictures show, by the names of their files."""
    names = {MEMORY, FIT, *(job.file for job in JOBS)}
    found = {name: Results.from_json((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    return found | {f"{GRID}{number}": grid for number, grid in enumerate(kept_grids(folder))}


def pictures(folder: Path) -> dict[str, str]:
    """Draw all pictures from a folder with results, by the names of their files."""
    results = stored_results(folder)
    return {name: draw(results) for name, draw in DRAWN.items()}


def measured_memory() -> Results:
    """Measure the memory of this library's losses over the vocabularies."""
    threads = ag.get_num_threads()
    growths = [growth for case in CASES for growth in memory(case, threads, sides=(OWN,))]
    return Results(machine.describe(), threads, {"memory": growths})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ascend_grad.bench.pictures", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure and store the memory of losses first")
    if parser.parse_args().measure:
        (FOLDER / f"{MEMORY}.json").write_text(measured_memory().to_json(), encoding="utf-8")
    for name, text in pictures(FOLDER).items():
        (PICTURES / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
