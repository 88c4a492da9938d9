"""Named cases of losses: of logits with rivals, and of linear layers compared with other calls of this library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import frameworks
from ..dtypes import DTYPES, NARROW_DTYPES
from ..grid.layouts import C_ORDER
from ..grid.losses import OPTIONS
from ..grid.problems import CROSS_ENTROPY, RowwiseProblem, draw
from ..linear.cases import FIRST, WHOLE

#: Shapes of logits and axes of the classes: a small batch, image classification, segmentation, language models.
CLASSIFICATION, SEGMENTATION, LANGUAGE = ((4096, 1000), 1), ((16, 21, 64, 64), 1), ((1024, 32000), 1)
LAYOUTS = (
    ((64, 128), 1),
    CLASSIFICATION,
    SEGMENTATION,
    ((16, 2, 64, 64), 1),
    LANGUAGE,
    ((512, 50257), 1),
    ((256, 128256), 1),
)
#: Layouts of the cases with an option.
OPTION_LAYOUTS = (CLASSIFICATION, SEGMENTATION, LANGUAGE)
#: Number and seed of the random problems of the loss of logits.
DRAWN, SEED = 100, 1

TOP_K = "linear_top_k"
JAX = "jax.linear_cross_entropy"
#: Names of the other sides: the plain loss with both gradients, the statistics, the loss of NumPy's arrays.
PLAIN, STATISTICS, ARRAYS = "plain", "statistics", "arrays"
OTHER_SIDES = {WHOLE: PLAIN, TOP_K: STATISTICS, JAX: ARRAYS}
#: The mode of a call with these options at once: logit scale, softcap, smoothing, z-loss and entropy.
ALL_OPTIONS = "scale + cap + smoothing + z-loss + entropy"
#: Modes that add an output alone. The results of the plain loss are the same.
FREE_OUTPUTS = ("lse", "log_prob", "predicted")
OUTPUTS = (*FREE_OUTPUTS, "entropy")
#: Modes of the loss of a linear layer, in addition to `OUTPUTS`: one option, or `ALL_OPTIONS`.
MODES = (ALL_OPTIONS, "bias", "scale and cap", "smoothing", "z-loss", "temperatures", "class weights", "8 targets")
#: The modes of the top-k, with the values of k.
TOP_K_MODES = {"k = 16": 16, "k = 128": 128}
COMPILED, COMPILED_DTYPES = "compiled", NARROW_DTYPES[:2]
#: Shape (BT, V, H) of a short call, which shows the cost of a call.
SHORT = (64, 1024, 256)


@dataclass(frozen=True)
class RelativeCase:
    """One call for a linear layer, which another call of this library is compared with.

    Attributes
    ----------
    operator : str
        The function: a key of `OTHER_SIDES`, whose value is the name of the other call.
    mode : str
        The option or output of a loss, or the value of k.
    dtype : str
        The dtype of input and weight.
    shape : tuple of int
        (BT, V, H).
    """

    operator: str
    mode: str
    dtype: str
    shape: tuple[int, int, int]

    @property
    def layout(self) -> str:
        return " × ".join(map(str, self.shape))

    @property
    def name(self) -> str:
        return f"{self.operator} {self.mode} {self.dtype} {self.layout}"

    @property
    def other(self) -> str:
        """Return the name of the other call."""
        return OTHER_SIDES[self.operator]


def logits() -> list[RowwiseProblem]:
    """Return the named cases of the loss of logits: new gradients, gradients at hand, and options."""
    return [
        *(_logits(layout, dtype) for layout in LAYOUTS for dtype in DTYPES),
        *(_logits(layout, "float32", mode="out") for layout in LAYOUTS[:5]),
        *(_logits(layout, "float32", option) for layout in OPTION_LAYOUTS for option in OPTIONS),
    ]


def quick_logits() -> list[RowwiseProblem]:
    """Return a choice of the named cases of logits."""
    return [_logits(layout, "float32") for layout in LAYOUTS[:4]]


def drawn() -> list[Any]:
    """Return the random problems of the loss of logits."""
    return draw(DRAWN, SEED, (CROSS_ENTROPY,))


def linear() -> list[RelativeCase]:
    """Return the cases of linear layers. Cases of JAX need its package."""
    return [
        *(RelativeCase(WHOLE, mode, "float32", FIRST) for mode in (*MODES, *OUTPUTS)),
        *(RelativeCase(WHOLE, mode, "bfloat16", FIRST) for mode in (ALL_OPTIONS, "predicted")),
        *(RelativeCase(TOP_K, mode, "float32", FIRST) for mode in TOP_K_MODES),
        RelativeCase(TOP_K, "k = 16", "bfloat16", FIRST),
        *_compiled(FIRST, SHORT),
    ]


def quick_linear() -> list[RelativeCase]:
    """Return a choice of the cases of linear layers, of short calls."""
    return [
        RelativeCase(WHOLE, ALL_OPTIONS, "float32", SHORT),
        RelativeCase(TOP_K, "k = 16", "float32", SHORT),
        *_compiled(SHORT),
    ]


def _logits(layout: tuple[tuple[int, ...], int], dtype: str, option: str = "", mode: str = "fresh") -> RowwiseProblem:
    return RowwiseProblem(CROSS_ENTROPY, dtype, *layout, mode, C_ORDER, C_ORDER, dtype, option)


def _compiled(*shapes: tuple[int, int, int]) -> list[RelativeCase]:
    if frameworks.module("jax") is None:
        return []
    return [RelativeCase(JAX, COMPILED, dtype, shape) for shape in shapes for dtype in COMPILED_DTYPES]
