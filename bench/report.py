"""Tables of the results of every benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from ascend_grad import _cpu

from .case import (
    AUTOGRAD,
    BACKWARD,
    DTYPES,
    DTYPES_OF_16_BITS,
    FORWARD,
    FRESH,
    LAYOUTS,
    MASKED,
    OUT,
    ROWWISE,
    STRANGE,
    Case,
    kind_of,
    layout_text,
)
from .cases import OPERATORS, ROWWISE_LAYOUTS
from .results import (
    ARRAYS,
    AWAKE,
    CHAIN,
    DEMONSTRATION,
    ESTIMATE,
    GRADIENT_CALL,
    NUMPY,
    ONEDNN,
    OWN,
    PRODUCTS,
    SCIPY,
    SKLEARN,
    STREAM,
    TORCH,
    UNFILTERED,
    WIDENED,
    Growth,
    Results,
    Row,
    Worst,
    side_of,
)
from .tables import DASH, milliseconds, percent, table, times
from .targets import LARGE_VOCABULARY

#: The sides of the tables of named cases: of the row-wise and of the linear operators.
ROWWISE_SIDES = (*NUMPY, "torch", *ONEDNN, "jax")
LINEAR_SIDES = (UNFILTERED, "numpy", *TORCH)
#: The sides of random problems, by the titles of their columns.
RIVALS = {
    "NumPy": NUMPY,
    "NumPy, widened": WIDENED,
    "SciPy": SCIPY,
    "torch": TORCH,
    "oneDNN": ONEDNN,
    "NumPy and cross_entropy": (CHAIN,),
    "scikit-learn": SKLEARN,
}
#: The rivals of the last lines of the command.
VERDICT_RIVALS = {
    "NumPy": NUMPY,
    "SciPy": SCIPY,
    "PyTorch": TORCH,
    "JAX": ("jax",),
    "oneDNN": ONEDNN,
    "scikit-learn": SKLEARN,
}
#: Rivals with a column only where they were measured.
RARE = (ONEDNN, (CHAIN,), SKLEARN)
LOSS_RIVALS = {name: RIVALS[name] for name in ("NumPy", "NumPy, widened", "torch")}
#: The rivals of classifiers, and the number of classes that divides their table.
CLASSIFIER_RIVALS = ("NumPy", "torch", "NumPy and cross_entropy", "scikit-learn")
MOST_OF_FEW = 16
VARIANT_RIVALS = {name: RIVALS[name] for name in ("NumPy", "torch")}
#: Groups of limits. The fastest limit of each group counts, and a call is subject to all groups.
LIMITS = (STREAM, (PRODUCTS,))
#: Ratios (a rival's time over ours) below which ours is slower, and clearly slower.
BEHIND, FAR_BEHIND = 1.0, 0.9
#: Share of a limit of the machine from which on a call counts as limited by the machine.
AT_THE_LIMIT = 0.85
WORST, FEWEST = 25, 10
#: Factors between estimated and measured times within which estimates are counted.
NEAR, FAR = 1.5, 2.5
#: Least seconds of a call whose estimate is compared. Shorter calls mostly check arguments, which no plan changes.
LEAST_ESTIMATED = 20e-6
NO_ESTIMATES = "These results have no estimates of such calls, which the benchmark got later."
NOT_BY_VARIANT = "These results have no cases of 16 bits on each variant of the CPU, which the benchmark got later."
CAPTION = (
    "How many times as long each rival takes (geometric mean), and in brackets the share of problems in which ours is "
    'slower by more than a tenth. "Widened": on float32 copies of 16-bit arrays, made beforehand.\n'
)
#: The captions of the tables that have one, by name of the block.
CAPTIONS = {
    "grid_summary": (
        "How many times longer others take (geometric means), and the share of problems in which ours is slower (< 1), "
        "and by more than a tenth (< 0.9):"
    ),
    "grid_variants": (
        "Linear problems of 16 bits on each variant of the CPU, beside PyTorch's own bfloat16 and float16 (geometric "
        "means and shares, as above):"
    ),
    "grid_estimates": (
        "Estimates, by which plans are chosen, over measured times, for row-wise problems that take at least "
        f"{1e6 * LEAST_ESTIMATED:g} µs: the median, the median over that of all problems, and the shares within a "
        f"factor {NEAR:g} and {FAR:g} of the median of all. Plans are chosen by ratios of estimates: how much faster a "
        "CPU is than the one on which the constants were measured does not matter:"
    ),
    "classifier_rows": "How many times as long others take, and the share of problems in which ours is slower:",
    "classifier_worst": "The lowest ratios:",
    "program_rows": (
        "Times in ms with the default number of threads, and how many times as long it takes with the best explicit "
        "number, and PyTorch:"
    ),
    "grid_lost": "More than a tenth behind NumPy, and not at a limit of the machine (times in ms, here and below):",
    "grid_worst_numpy": "Lowest against NumPy (*: at a limit of the machine):",
    "grid_worst_widened": "Lowest against NumPy on float32 copies of 16-bit arrays, made beforehand:",
    "grid_worst_torch": "Lowest against torch:",
    "grid_worst_onednn": "Lowest against oneDNN:",
    "loss_rows": "Times in ms, and how many times as long others take (*: at a limit of the machine):",
    "loss_lost": "Where NumPy or PyTorch is faster:",
    "loss_drawn": (
        "Random problems: how many times longer others take (geometric means), and the share of problems in which ours "
        "is slower (< 1), and by more than a tenth (< 0.9):"
    ),
    "loss_worst": "Random problems that are lowest against PyTorch (times in ms):",
    "loss_linear": "Times in ms; the relative speed is the time of the other call as a share of ours:",
    "loss_second_order": (
        "Random products of the Hessian and a vector: how many times as long one takes as our loss with its gradient, "
        "and how many times as long others take for the product (geometric means and ranges):"
    ),
    "loss_second_order_rows": "Every one of these problems (times in ms):",
    "loss_sparse": (
        "Random losses of sparse inputs with the weight gradient: how many times as long others take (geometric means "
        "and ranges):"
    ),
    "loss_sparse_rows": "Every one of these problems (times in ms):",
}


#: A column of a table: its title, and the text of a row's cell.
Column = tuple[str, Callable[[Row], str]]


def _rows(rows: Iterable[Row], *columns: Column) -> str:
    """Make a table with a line for every row."""
    return table([title for title, _ in columns], ([text(row) for _, text in columns] for row in rows))


def _name(title: str) -> Column:
    return title, lambda row: row.case.name


def _ms(title: str, *sides: str) -> Column:
    """Return a column of the times of the fastest of some sides, in milliseconds."""
    return title, lambda row: milliseconds(row.best(*sides))


def _ratio(title: str, *sides: str) -> Column:
    """Return a column of the times of the fastest of some sides, as multiples of ours."""
    return title, lambda row: times(row.speedup(*sides))


OWN_MS, OF_STREAM = _ms("ms", OWN), ("of stream", lambda row: percent(row.speedup(*STREAM)))


def _captioned(tables: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{CAPTIONS[name]}\n\n{content}" for name, content in tables.items()}


# ---- row-wise operators ----------------------------------------------------------------------------------------------


def rowwise_rows(rows: Sequence[Row]) -> str:
    """Make a table with a line for every case: our time, then the others' times as multiples of ours."""
    sides = [side for side in ROWWISE_SIDES if any(side in row.seconds for row in rows)]
    return _rows(rows, _name("case"), OWN_MS, *(_ratio(side, side) for side in sides), OF_STREAM)


def rowwise_lost(rows: Sequence[Row]) -> str:
    """Make a table of the cases in which another side is faster."""
    lost = [row for row in rows if (row.speedup(*ROWWISE_SIDES) or 1) < 1]
    return rowwise_rows(lost) if lost else "None.\n"


def rowwise_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Make the tables of the row-wise operators, by name of the block."""
    found = {row.case: row for row in rows}

    def cell(operator: str, dtype: str, shape: tuple[int, ...], dim: int | None, mode: str, text=None) -> str:
        """Format the result of a case, by default torch's time as a multiple of ours; a dash if it was not measured."""
        row = found.get(Case(operator, dtype, shape, mode, dim))
        return DASH if row is None else text(row) if text else times(row.speedup("torch"))

    columns = (OWN_MS, _ratio("NumPy", "numpy"), _ratio("torch", "torch"), OF_STREAM)
    modes = {OUT: "`out=`", FRESH: "new"}
    speed, torch = [], []
    for layout in ROWWISE_LAYOUTS:
        by_operator = (cell(name, "float32", *layout, OUT, text) for name in BACKWARD for _, text in columns)
        speed.append([layout_text(*layout), *by_operator])
        by_dtype = ([cell(name, dtype, *layout, mode) for name in BACKWARD] for dtype in DTYPES for mode in modes)
        torch.append([layout_text(*layout), *map(" / ".join, by_dtype)])

    def layouts(operators: Sequence[str]) -> Iterable[tuple[tuple[int, ...], int | None]]:
        return dict.fromkeys((c.shape, c.dim) for c in found if c.operator in operators and c.mode == OUT)

    others = (
        [f"{operator}, {layout_text(*layout)}", *(cell(operator, dtype, *layout, OUT) for dtype in DTYPES)]
        for operators in (FORWARD, MASKED)
        for operator in operators
        for layout in layouts(operators)
    )
    titles = [f"{name}: {title}" for name in ("softmax", "log-softmax") for title, _ in columns]
    kinds = [f"{dtype} {title}" for dtype in DTYPES for title in modes.values()]
    return {
        "speed": table(["float32, with `out=`", *titles], speed),
        "torch": table(["torch's time / ours", *kinds], torch),
        "others": table(["torch's time / ours", *DTYPES], others),
        "losses": rowwise_lost(rows),
        "rows": rowwise_rows(rows),
    }


def accuracy_block(accuracy: Sequence[Worst]) -> str:
    """Make a table of the largest errors, with a column for every CPU variant."""
    variants = list(dict.fromkeys(worst.variant for worst in accuracy))
    lines = []
    for operator, dtype in dict.fromkeys((worst.operator, worst.dtype) for worst in accuracy):
        found = {w.variant: w for w in accuracy if (w.operator, w.dtype) == (operator, dtype)}
        worst = max(found.values(), key=lambda item: item.error)
        cells = [f"{found[name].error:.2f}" if name in found else DASH for name in variants]
        lines.append([f"{operator} {dtype}", *cells, f"{worst.values}, n = {worst.length}"])
    return table(["largest error / bound", *variants, "where"], lines)


# ---- linear operators ------------------------------------------------------------------------------------------------


def linear_rows(rows: Sequence[Row]) -> str:
    """Make a table with a line for every case: our time and rate, then the others' times as multiples of ours.

    If no case of 16 bits has a variant, a sentence says so.
    """
    is_by_variant = any(row.case.variant and row.case.dtype in DTYPES_OF_16_BITS for row in rows)

    def rate(row: Row) -> str:
        billions = row.case.operations / row.own / 1e9
        return f"{billions:.3g}" if billions < 100 else f"{billions:.0f}"

    return ("" if is_by_variant else f"{NOT_BY_VARIANT}\n\n") + _rows(
        rows,
        *(_name("case"), OWN_MS, ("GFLOP/s", rate), ("of BLAS", lambda row: percent(row.of_yardstick))),
        *(_ratio(side, side) for side in LINEAR_SIDES),
    )


def memory_block(memory: Sequence[Growth]) -> str:
    """Make a table of the memory of calls in addition to their results, with a line for every call."""
    found = {(growth.case, growth.side): growth for growth in memory}
    sides = [side for side in (OWN, *LINEAR_SIDES) if any(growth.side == side for growth in memory)]

    def cell(case: Case, side: str, attribute: str) -> str:
        growth = found.get((case, side))
        return DASH if growth is None else f"{getattr(growth, attribute) / 2**20:.1f}"

    return table(
        ["MiB beyond the results", "promised", *sides],
        (
            [case.name, cell(case, OWN, "promise"), *(cell(case, side, "bytes") for side in sides)]
            for case in dict.fromkeys(growth.case for growth in memory)
        ),
    )


# ---- tensors ---------------------------------------------------------------------------------------------------------


def tensors_blocks(results: Results) -> dict[str, str]:
    """Make the tables of calls on tensors: without gradients, of forward and backward together, and of the loss."""

    def microseconds(title: str, side: str) -> Column:
        return title, lambda row: f"{1e6 * row.seconds[side]:.2f}" if side in row.seconds else DASH

    ratio = _ratio("torch / ours", "torch")
    calls, autograd = (
        [row for row in results["speed"] if (row.case.mode == AUTOGRAD) == is_autograd] for is_autograd in (False, True)
    )
    sides = microseconds("tensors", OWN), microseconds("NumPy arrays", ARRAYS), microseconds("torch", "torch")
    name = "forward and backward", lambda row: f"{row.case.operator} {row.case.dtype} {row.case.layout}"
    awake = _ms("threads awake: ms", OWN + AWAKE), ("torch / ours", lambda row: times(row.awake_ratio))
    loss = "loss and gradients", lambda row: f"{row.case.dtype} {row.case.layout}"
    return {
        "tensors_calls": _rows(calls, _name("case, µs"), *sides, ratio),
        "tensors_autograd": _rows(autograd, name, OWN_MS, ratio, *awake),
        "tensors_losses": _rows(results["linear"], loss, OWN_MS, *(_ratio(f"{side} / ours", side) for side in TORCH)),
    }


# ---- random problems -------------------------------------------------------------------------------------------------


def limit_share(row: Row) -> float | None:
    """Return a call's speed as a fraction of the limit set by memory or arithmetic, or None if neither is known."""
    limits = [row.best(*group) or 0.0 for group in LIMITS]
    return max(limits) / row.own if any(limits) else None


def is_at_the_limit(row: Row) -> bool:
    return (limit_share(row) or 0) >= AT_THE_LIMIT


def limit_text(row: Row) -> str:
    share = limit_share(row)
    return DASH if share is None else f"{percent(share)}{' *' if is_at_the_limit(row) else ''}"


OF_LIMIT = ("of the limit", limit_text)


def _by(rows: Sequence[Row], attribute: str, values: Iterable[str], title: str = "") -> dict[str, list[Row]]:
    """Return groups of the rows whose cases have each value of an attribute."""
    return {f"{title}{value}": [row for row in rows if getattr(row.case, attribute) == value] for value in values}


def grid_groups(grids: Sequence[Results]) -> dict[str, list[Row]]:
    """Return the rows of random problems by group, of which each has a line in the summary."""
    rows = [row for grid in grids for row in grid.rows]
    found = {"all": rows}
    if len(grids) > 1:
        found |= {f"seed {grid.facts['seed']}": grid.rows for grid in grids}
    families = {title: [row for grid in grids for row in grid[key]] for title, key in FAMILIES.items()}
    for title, part in families.items():
        found |= {title: part} | _by(part, "dtype", DTYPES, f"{title}, ")
    found |= _by_layout(families["row-wise"], "row-wise, ")
    found |= _by(rows, "operator", OPERATORS)
    return {title: part for title, part in found.items() if part}


def _by_layout(rows: Sequence[Row], title: str = "") -> dict[str, list[Row]]:
    """Return groups of the rows by the layout of the inputs, without numbers."""
    return {
        f"{title}{layout}": [row for row in rows if kind_of(row.case.arrangement) == layout]
        for layout in (*LAYOUTS, *STRANGE)
    }


def estimates_block(rows: Sequence[Row]) -> str:
    """Make a table of estimated over measured times, for every operator and layout."""
    rows = [row for row in rows if ESTIMATE in row.seconds and row.own >= LEAST_ESTIMATED]
    if not rows:
        return f"{NO_ESTIMATES}\n"
    lines = []
    of_all = statistics.median(row.seconds[ESTIMATE] / row.own for row in rows)
    for title, part in ({"all": rows} | _by(rows, "operator", ROWWISE) | _by_layout(rows)).items():
        if part:
            ratios = [row.seconds[ESTIMATE] / row.own / of_all for row in part]
            shares = [sum(max(ratio, 1 / ratio) <= factor for ratio in ratios) / len(ratios) for factor in (NEAR, FAR)]
            median = statistics.median(ratios)
            lines.append([title, str(len(ratios)), times(median * of_all), times(median), *map(percent, shares)])
    return table(
        ["estimate / measured", "problems", "median", "over all", f"within {NEAR:g}", f"within {FAR:g}"], lines
    )


#: The families of random problems, and the names of their sections of the results.
FAMILIES = {"row-wise": "rowwise", "linear": "linear"}


def _ratios(rows: Iterable[Row], names: Sequence[str], own: str = OWN) -> list[tuple[float, Row]]:
    """Return the rows with a rival, and its time as a multiple of that of one of our sides."""
    return [(best / row.seconds[own], row) for row in rows if (best := row.best(*names)) is not None]


def verdict(rows: Iterable[Row]) -> str:
    """Say in how many cases each rival is slower than this library, and list the cases in which it is faster."""
    rows = [row for row in rows if OWN in row.seconds]
    lines = []
    for rival, names in VERDICT_RIVALS.items():
        if not (ratios := _ratios(rows, names)):
            continue
        lost = sorted((item for item in ratios if item[0] < BEHIND), key=lambda item: item[0])
        mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
        lines.append(
            f"Faster than {rival} in {len(ratios) - len(lost)} of {len(ratios)} cases; {rival} takes {times(mean)} "
            f"as long (geometric mean)."
        )
        if lost:
            lines[-1] += f" Slower in {len(lost)}:"
            lines += [f"  {times(ratio)}  {row.case.name}" for ratio, row in lost[:WORST]]
        if len(lost) > WORST:
            lines.append(f"  and {len(lost) - WORST} more")
    return "\n".join(lines)


def _summary(ratios: Sequence[tuple[float, Row]]) -> list[str]:
    """Format the geometric mean of ratios, and the shares below BEHIND and below FAR_BEHIND."""
    if not ratios:
        return [DASH] * 3
    found = [ratio for ratio, _ in ratios]
    shares = [sum(ratio < bound for ratio in found) / len(found) for bound in (BEHIND, FAR_BEHIND)]
    return [times(statistics.geometric_mean(found)), *map(percent, shares)]


def _sides_of(groups: Iterable[Sequence[Row]]) -> set[str]:
    """Return the names of all sides that were measured in some rows."""
    return {side for rows in groups for row in rows for side in row.seconds}


def summary_table(
    groups: Mapping[str, Sequence[Row]], rivals: Mapping[str, Sequence[str]], own: Mapping[str, str] | None = None
) -> str:
    """Make a table of the geometric means and the shares of slower problems, with a line for every group of rows.

    ``rivals`` has the names of each rival's sides, and ``own`` our side in each group, if that is not `OWN`.
    """
    sides = _sides_of(groups.values())
    # oneDNN takes part where it is installed.
    rivals = {rival: names for rival, names in rivals.items() if names not in RARE or sides & {*names}}
    header = ["rival's time / ours", "problems"]
    for rival in rivals:
        header += [rival, f"< {BEHIND:g}", f"< {FAR_BEHIND:g}"]
    lines = []
    for title, rows in groups.items():
        side = own[title] if own else OWN
        cells = [cell for names in rivals.values() for cell in _summary(_ratios(rows, names, side))]
        lines.append([title, str(len(rows)), *cells])
    return table(header, lines)


def overview_block(grids: Sequence[Results], classifiers: Sequence[Row] = ()) -> str:
    """Make a short summary: a line for each family of operators, and a column for each rival."""
    families = {family: [row for grid in grids for row in grid[section]] for family, section in FAMILIES.items()}
    families = {family: rows for family, rows in (families | {"classifiers": [*classifiers]}).items() if rows}
    sides = _sides_of(families.values())
    rivals = {rival: names for rival, names in RIVALS.items() if sides & {*names}}
    lines = [
        [family, str(len(rows)), *(_brief(_ratios(rows, names)) for names in rivals.values())]
        for family, rows in families.items()
    ]
    return f"{CAPTION}\n{table(['rival', 'problems', *rivals], lines)}"


def _brief(ratios: Sequence[tuple[float, Row]]) -> str:
    """Format the geometric mean of ratios, and the share below FAR_BEHIND."""
    mean, _, far_behind = _summary(ratios)
    return f"{mean} ({far_behind})" if ratios else DASH


def classifier_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Make the tables of random classifiers: a summary by dtype and classes, and the lowest ratios."""
    rivals = {rival: RIVALS[rival] for rival in CLASSIFIER_RIVALS}
    few, many = f"up to {MOST_OF_FEW} classes", f"more than {MOST_OF_FEW} classes"
    groups = {"all": list(rows)} | _by(rows, "dtype", DTYPES)
    groups |= {few: [row for row in rows if row.case.shape[1] <= MOST_OF_FEW]}
    groups |= {many: [row for row in rows if row.case.shape[1] > MOST_OF_FEW]}
    names = tuple(name for names in rivals.values() for name in names)
    return _captioned(
        {
            "classifier_rows": summary_table({title: part for title, part in groups.items() if part}, rivals),
            "classifier_worst": worst_block(rows, names, FEWEST),
        }
    )


def variants_block(rows: Sequence[Row]) -> str:
    """Make a table of the variants in linear problems of 16 bits: how many times as long others take."""
    sides = _sides_of([rows])
    names = [variant for variant in _cpu.VARIANTS if side_of(variant) in sides]
    if not names:
        return "These results have no times of each variant, which the benchmark got later.\n"
    own = {f"{dtype}, {variant}": (dtype, side_of(variant)) for dtype in DTYPES_OF_16_BITS for variant in names}
    groups = {
        title: [row for row in rows if row.case.dtype == dtype and side in row.seconds]
        for title, (dtype, side) in own.items()
    }
    return summary_table(groups, VARIANT_RIVALS, {title: side for title, (_, side) in own.items()})


def worst_block(rows: Sequence[Row], names: Sequence[str], count: int = WORST) -> str:
    """Make a table of the problems with the lowest ratios, with the times of all sides."""
    found = _ratios(rows, names)
    return _table_of_times(found, names, count) if found else "Nothing was measured.\n"


def grid_lost(rows: Sequence[Row]) -> str:
    """Make a table of problems in which NumPy is clearly faster, and ours is not limited by memory or arithmetic."""
    lost = [(ratio, row) for ratio, row in _ratios(rows, NUMPY) if ratio < FAR_BEHIND and not is_at_the_limit(row)]
    return _table_of_times(lost, NUMPY) if lost else "None.\n"


def _table_of_times(items: Sequence[tuple[float, Row]], names: Sequence[str], count: int | None = None) -> str:
    """Make a table of the problems with the lowest ratios to some sides, with the times of all sides."""
    rows = [row for _, row in sorted(items, key=lambda item: item[0])[:count]]
    columns = (
        _ms(rival, *sides)
        for rival, sides in RIVALS.items()
        if sides not in RARE or any(row.best(*sides) for row in rows)
    )
    return _rows(rows, _name("problem"), _ratio("ratio", *names), OWN_MS, *columns, OF_LIMIT)


def grid_blocks(grids: Sequence[Results]) -> dict[str, str]:
    """Make all tables of random problems, by name of the block."""
    rows = [row for grid in grids for row in grid.rows]
    of_onednn = {"grid_worst_onednn": worst_block(rows, ONEDNN)} if _ratios(rows, ONEDNN) else {}
    return _captioned(
        {
            "grid_summary": summary_table(grid_groups(grids), RIVALS),
            "grid_variants": variants_block([row for grid in grids for row in grid["linear"]]),
            "grid_estimates": estimates_block(rows),
            "grid_lost": grid_lost(rows),
            "grid_worst_numpy": worst_block(rows, NUMPY),
            "grid_worst_widened": worst_block(rows, WIDENED),
            "grid_worst_torch": worst_block(rows, TORCH),
            **of_onednn,
        }
    )


# ---- programs --------------------------------------------------------------------------------------------------------


def with_threads(row: Row) -> list[str]:
    """Return our sides with explicit numbers of threads."""
    return [side for side in row.seconds if side.startswith(f"{OWN},")]


def programs_rows(rows: Sequence[Row]) -> str:
    """Make a table of calls in programs: the default number of threads, the best explicit number, and PyTorch."""

    def best(row: Row) -> str:
        return min(with_threads(row), key=row.seconds.__getitem__).removeprefix(f"{OWN}, ")

    explicit = "best explicit / default", lambda row: times(row.speedup(*with_threads(row)))
    return _rows(rows, _name("call"), OWN_MS, ("best explicit", best), explicit, _ratio("torch", "torch"))


def programs_blocks(rows: Sequence[Row]) -> dict[str, str]:
    return _captioned({"program_rows": programs_rows(rows)})


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses_rows(rows: Sequence[Row]) -> str:
    """Make a table with a line for every case: our time, then the others' times as multiples of ours."""
    ratios = (_ratio(rival, *names) for rival, names in LOSS_RIVALS.items())
    return _rows(rows, _name("case"), OWN_MS, *ratios, OF_LIMIT)


def losses_lost(rows: Sequence[Row]) -> str:
    """Make a table of the cases in which NumPy or PyTorch is faster."""
    lost = [row for row in rows if (row.speedup(*NUMPY, *TORCH) or 1) < 1]
    return losses_rows(lost) if lost else "None.\n"


def _drawn(rows: Sequence[Row]) -> str:
    """Make a table of the means of random problems, for every dtype, every layout and a large vocabulary."""
    groups = {"all": rows} | _by(rows, "dtype", DTYPES) | _by(rows, "arrangement", LAYOUTS)
    large = [row for row in rows if row.case.shape[row.case.dim or 0] >= LARGE_VOCABULARY]
    groups |= {f"from {LARGE_VOCABULARY:,} classes": large}
    return summary_table({title: part for title, part in groups.items() if part}, LOSS_RIVALS)


def relative_rows(rows: Sequence[Row]) -> str:
    """Make a table of calls for a linear layer: the times of both calls, and our speed relative to the other's."""
    other = "ms", lambda row: milliseconds(row.best(row.case.other))
    relative = "relative speed", lambda row: percent(row.speedup(row.case.other))
    return _rows(rows, _name("call"), OWN_MS, ("compared with", lambda row: row.case.other), other, relative)


def losses_blocks(results: Results) -> dict[str, str]:
    """Make all tables of losses that these results can fill, by name of the block."""
    logits, drawn, linear = (results[name] for name in ("logits", "drawn", "linear"))
    found = {}
    if logits:
        found["loss_rows"] = losses_rows(logits)
    if logits or drawn:
        found["loss_lost"] = losses_lost([*logits, *drawn])
    if drawn:
        found["loss_drawn"] = _drawn(drawn)
        found["loss_worst"] = worst_block(drawn, TORCH)
    if linear:
        found["loss_linear"] = relative_rows(linear)
    if products := results["second_order"]:
        found |= second_order_tables(products)
    if sparse := results["sparse"]:
        found |= sparse_tables(sparse)
    return _captioned(found)


def second_order_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Make the tables of products of the Hessian: of each operator and dtype, and of every problem."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(f"{row.case.operator} {row.case.dtype}", []).append(row)

    def of_gradient(row: Row) -> float:
        return row.own / row.seconds[GRADIENT_CALL]

    sides = {"NumPy": NUMPY, "torch": TORCH}
    lines = (
        [kind, str(len(part)), mean_and_range(map(of_gradient, part)), *(_ratios_text(part, s) for s in sides.values())]
        for kind, part in sorted(kinds.items())
    )
    of_each = (_ratio(side, *names) for side, names in sides.items())
    gradient = ("of the gradient", lambda row: times(of_gradient(row)))
    return {
        "loss_second_order": table(["product", "problems", "product / gradient", *sides], lines),
        "loss_second_order_rows": _rows(rows, _name("product"), OWN_MS, gradient, *of_each),
    }


def sparse_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Make the tables of losses of sparse inputs: by dtype and number of classes, and of every problem."""
    groups = {"all": rows} | _by(rows, "dtype", DTYPES)
    groups["up to 16 classes"] = [row for row in rows if row.case.shape[1] <= 16]
    groups["more classes"] = [row for row in rows if row.case.shape[1] > 16]
    sides = {"SciPy and cross_entropy": (CHAIN,), "SciPy and NumPy": NUMPY, "scikit-learn": SKLEARN}
    lines = (
        [group, str(len(part)), *(_ratios_text(part, names) for names in sides.values())]
        for group, part in groups.items()
        if part
    )
    return {
        "loss_sparse": table(["rival's time / ours", "problems", *sides], lines),
        "loss_sparse_rows": _rows(
            rows, _name("loss"), OWN_MS, *(_ratio(side, *names) for side, names in sides.items())
        ),
    }


def mean_and_range(ratios: Iterable[float]) -> str:
    """Format the geometric mean of ratios, with the least and the largest one; a dash if there are none."""
    found = list(ratios)
    if not found:
        return DASH
    return f"{times(statistics.geometric_mean(found))} ({times(min(found))} to {times(max(found))})"


def _ratios_text(rows: Iterable[Row], names: Sequence[str]) -> str:
    """Format the times of the fastest of some sides as multiples of ours."""
    return mean_and_range(ratio for ratio, _ in _ratios(rows, names))


# ---- fits ------------------------------------------------------------------------------------------------------------


def fit_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Make the tables of fits and boosting objectives, by name of the block: of each kind of call, and of every call.

    Both have the others' times as multiples of ours: the first one their geometric means and ranges.
    """
    sides = (*SKLEARN, *NUMPY[:1], DEMONSTRATION)
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(f"{row.case.operator} {row.case.mode} {row.case.dtype}", []).append(row)

    lines = ([kind, str(len(part)), *(_ratios_text(part, (side,)) for side in sides)] for kind, part in kinds.items())
    return {
        "fit": table(["call", "cases", *sides], lines),
        "fit_rows": _rows(rows, _name("call"), OWN_MS, *(_ratio(side, side) for side in sides)),
    }
