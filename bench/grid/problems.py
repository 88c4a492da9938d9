"""Random problems. A seed always gives the same problems, and a longer grid begins with all of a shorter one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..dtypes import DTYPES
from ..linear.cases import GRADIENT, MAX_SUM, MODES, WHOLE, LinearCase
from ..rowwise.cases import BACKWARD, FORWARD, MASKED, Case
from .layouts import BROADCAST, C_ORDER, LAYOUTS

#: The loss of logits, a row-wise operator.
CROSS_ENTROPY = "cross_entropy"
ROWWISE = (*BACKWARD, *MASKED, *FORWARD, CROSS_ENTROPY)
LINEAR_MODES = {GRADIENT: MODES, MAX_SUM: ("forward",), WHOLE: ("loss and gradients",)}
LINEAR = tuple(LINEAR_MODES)
#: The operators, in the order in which the problems of a grid take them.
OPERATORS = (*BACKWARD, GRADIENT, *MASKED, MAX_SUM, *FORWARD, WHOLE, CROSS_ENTROPY)

#: Most elements of a row-wise problem, by default.
MAX_ELEMENTS = 2**22
#: Largest value of each of BT, V and H.
MAX_LENGTH = 2**18
#: Largest product BT*V*H, which takes some tens of milliseconds on two cores.
MAX_PRODUCT = 2**29
#: Most elements of any matrix of a linear problem, the logits included.
MAX_MATRIX = 2**27

IN_PLACE = "in place"


@dataclass(frozen=True)
class RowwiseProblem(Case):
    """A row-wise call, with the layouts of its arrays.

    Attributes
    ----------
    mode : {"out", "fresh", "in place"}
        The array of the result: an existing one, a new one, or the first input.
    arrangement : str
        The inputs' layout in memory: one of `layouts.LAYOUTS`.
    out_arrangement : str
        The layout of the array for the result.
    out_dtype : str
        The dtype of the result.
    options : str
        For `CROSS_ENTROPY`: one of `losses.OPTIONS`, or "". Random problems have none.
    """

    arrangement: str
    out_arrangement: str
    out_dtype: str
    options: str = ""

    @property
    def name(self) -> str:
        operator = f"{self.operator} with {self.options}" if self.options else self.operator
        target = self.mode
        if self.mode == "out":
            dtype = "" if self.out_dtype == self.dtype else f" {self.out_dtype}"
            target = f"out {self.out_arrangement}{dtype}"
        return f"{operator} {self.dtype} {self.shape} dim {self.dim}, {self.arrangement}, {target}"


Problem = RowwiseProblem | LinearCase


def draw(
    count: int, seed: int, operators: Sequence[str] = OPERATORS, max_elements: int = MAX_ELEMENTS
) -> list[Problem]:
    """Draw `count` problems, whose operators alternate. With all operators, three of ten problems are linear."""
    problems: list[Problem] = []
    for index in range(count):
        random = np.random.default_rng((seed, index))
        operator = operators[index % len(operators)]
        problems.append(_linear(operator, random) if operator in LINEAR else _rowwise(operator, random, max_elements))
    return problems


def _rowwise(operator: str, random: np.random.Generator, max_elements: int) -> RowwiseProblem:
    dtype = str(random.choice(DTYPES))
    size = math.exp(random.uniform(math.log(4), math.log(max_elements)))
    shape: tuple[int, ...]
    if operator in MASKED:
        # The last two dims have equal lengths, as in attention.
        length = round(size ** random.uniform(0.1, 0.5))
        first, second = _lengths(size / length**2, 2, random)
        shape, dim = (first, second, length, length), 3
    else:
        # Ranks 6 to 8 are rare in practice, and drawn for one problem in ten.
        rank = int(random.integers(1, 6) if random.random() < 0.9 else random.integers(6, 9))
        shape = _lengths(size, rank, random)
        dim = int(random.integers(rank))
    arrangement = str(random.choice(LAYOUTS))
    modes = ("fresh", "out") if arrangement == BROADCAST else ("fresh", "out", "out", IN_PLACE)
    mode = str(random.choice(modes))
    out_arrangement, out_dtype = arrangement if mode == IN_PLACE else C_ORDER, dtype
    if mode == "out" and arrangement != BROADCAST and random.random() < 0.5:
        out_arrangement = arrangement
    if mode == "out" and random.random() < 0.25:
        out_dtype = str(random.choice([other for other in DTYPES if other != dtype]))
    return RowwiseProblem(operator, dtype, shape, dim, mode, arrangement, out_arrangement, out_dtype)


def _lengths(size: float, rank: int, random: np.random.Generator) -> tuple[int, ...]:
    """Draw lengths whose product is approximately the size."""
    parts = random.dirichlet(np.ones(rank))
    return tuple(max(1, round(size**part)) for part in parts)


def _linear(operator: str, random: np.random.Generator) -> LinearCase:
    dtype = str(random.choice(DTYPES))
    mode = str(random.choice(LINEAR_MODES[operator]))
    while True:
        rows, vocabulary, width = (round(MAX_LENGTH ** random.random()) for _ in range(3))
        largest_matrix = max(rows * vocabulary, vocabulary * width, rows * width)
        if rows * vocabulary * width <= MAX_PRODUCT and largest_matrix <= MAX_MATRIX:
            return LinearCase(operator, mode, dtype, (rows, vocabulary, width))
