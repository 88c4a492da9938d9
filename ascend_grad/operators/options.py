"""The options of losses and their outputs, each once: name, default, kind, range and documentation.

`table` takes the checks from here, and the functions of all libraries take signatures, conversions and documentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

#: Minimum of the argument `workspace_bytes`.
MIN_WORKSPACE_BYTES = 4 << 20
#: Largest number of log-probabilities that `linear_top_k` returns for each row.
MAX_TOP_K = 128


class Range(NamedTuple):
    """A range of real numbers, without NaN."""

    #: The description of such a number in errors.
    expected: str
    low: float
    high: float
    includes_low: bool = False
    includes_high: bool = False


FINITE = Range("a finite number", -math.inf, math.inf)
POSITIVE = Range("a positive finite number", 0.0, math.inf)
NOT_NEGATIVE = Range("a finite number that is not negative", 0.0, math.inf, includes_low=True)
FRACTION = Range("a number in [0, 1]", 0.0, 1.0, includes_low=True, includes_high=True)
NO_SMOOTHING = Range("0 (smoothing is not supported)", 0.0, 0.0, includes_low=True, includes_high=True)

#: Kinds of options: one number, an array of numbers, a number for all rows or for each one, and names of outputs.
NUMBER, PER_ROW, PER_CLASS, PER_TARGET, NUMBER_OR_PER_ROW, NAMES = range(6)
#: Kinds of options that may be arrays.
ARRAYS = (PER_ROW, PER_CLASS, PER_TARGET, NUMBER_OR_PER_ROW)


#: The losses that have options.
EVERY_LOSS = ("cross_entropy", "linear_cross_entropy")
#: The name under which devices have the fused operators of the loss of a linear layer.
FUSED = "fused_linear_cross_entropy"


class Option(NamedTuple):
    """An option of the losses. The default leaves a loss as it is."""

    name: str
    kind: int
    default: Any
    #: The range of a number.
    range: Range | None
    #: The documentation, of which the first sentence is about the meaning.
    text: str
    #: Whether the loss of logits also has the option; otherwise only the loss of a linear layer has it.
    of_logits: bool = True
    #: The losses that devices compute with it.
    on_device: tuple[str, ...] = ()
    #: Whether the option is the factor of a term that a mean divides only by the sum of the token weights.
    has_own_divisor: bool = False
    #: Whether the gradient of a loss with it depends on the entropy of the rows.
    needs_entropy: bool = False

    @property
    def is_array(self) -> bool:
        """Return whether the option is always an array."""
        return self.kind in (PER_ROW, PER_CLASS, PER_TARGET)

    @property
    def is_number(self) -> bool:
        """Return whether the option may be one number."""
        return self.kind in (NUMBER, NUMBER_OR_PER_ROW)


class Output(NamedTuple):
    """A result of a loss beside the loss and its gradients."""

    name: str
    text: str
    #: Whether it is int64. The others have the dtype of the loss.
    is_integer: bool = False
    #: Whether it is one number. The others have one for each row.
    is_total: bool = False
    #: Whether it has an upstream gradient, ``grad_<name>``.
    has_gradient: bool = True
    #: Whether it is about a single target of each row, and not defined with `target_prob`.
    of_one_target: bool = False
    #: Whether it has one number for each target: K in each row with `target_prob`.
    is_of_targets: bool = False
    #: Whether it has the shape and the dtype of the logits. A linear layer's loss, which keeps no logits, lacks it.
    is_of_logits: bool = False
    #: The losses that devices compute with it and with its upstream gradient.
    on_device: tuple[str, ...] = ()


OPTIONS = {
    option.name: option
    for option in (
        Option(
            "token_weight",
            PER_ROW,
            None,
            None,
            "Factors :math:`r` of the losses of the rows. A row of weight 0 adds nothing to the loss and to the "
            "gradients, whatever values it holds.",
            on_device=(*EVERY_LOSS, FUSED),
        ),
        Option(
            "class_weight",
            PER_CLASS,
            None,
            None,
            "Factors :math:`c` of the classes. A term of weight 0 is 0, whatever its logit is.",
            on_device=(*EVERY_LOSS, FUSED),
        ),
        Option(
            "target_prob",
            PER_TARGET,
            None,
            None,
            "Probabilities :math:`q` of K targets in each row, or the number 0: all are 0. A target that is "
            "`ignore_index` adds nothing, and a row of such targets alone is ignored. Equal targets of a row are added "
            "up.",
            on_device=("cross_entropy",),
        ),
        Option(
            "label_smoothing",
            NUMBER,
            0.0,
            FRACTION,
            "The share :math:`s` of the loss that goes to all classes, from 0 to 1.",
            on_device=EVERY_LOSS,
        ),
        Option(
            "lse_square_scale",
            NUMBER,
            0.0,
            FINITE,
            "The factor of the squared :math:`\\mathrm{lse}`, which keeps logits from drifting (z-loss).",
            on_device=EVERY_LOSS,
            has_own_divisor=True,
        ),
        Option(
            "temperature",
            NUMBER_OR_PER_ROW,
            1.0,
            POSITIVE,
            "The divisor of the logits, above 0: one number, or one for each row. A number outside of "
            "[2**-60, 2**60] counts as the nearest end ([2**-500, 2**500] if `input` is float64).",
            on_device=EVERY_LOSS,
        ),
        Option(
            "denominator",
            NUMBER,
            None,
            POSITIVE,
            "The divisor of a mean, above 0, instead of the sums of weights. Ranks that share a batch pass the sum "
            "over all ranks.",
            on_device=(*EVERY_LOSS, FUSED),
        ),
        Option(
            "bias",
            PER_CLASS,
            None,
            None,
            "The layer's bias. If `input` is not float64, a finite number above the range of float32 counts as its "
            "largest number, and one below it as negative infinity.",
            of_logits=False,
            on_device=("linear_cross_entropy",),
        ),
        Option(
            "logit_scale",
            NUMBER,
            1.0,
            FINITE,
            "The factor of the logits before `softcap` and `temperature`. A number beyond 2**60 (2**500 if `input` is "
            "float64) counts as that number.",
            on_device=EVERY_LOSS,
        ),
        Option(
            "softcap",
            NUMBER,
            None,
            POSITIVE,
            "The bound of the logits before `temperature` divides them, above 0; limited as `temperature` is. None: "
            "the logits are not bounded.",
            on_device=EVERY_LOSS,
        ),
        Option(
            "outputs",
            NAMES,
            (),
            None,
            "Further results, as additional fields in this order.",
        ),
    )
}

OUTPUTS = {
    output.name: output
    for output in (
        Output(
            "lse",
            "The logarithm of the sum of the exponentials of each row's logits; 0 for ignored rows.",
            on_device=(*EVERY_LOSS, FUSED),
        ),
        Output(
            "log_prob",
            "The log-probability of each target, also of several in a row; 0 for ignored targets.",
            is_of_targets=True,
            on_device=(*EVERY_LOSS, FUSED),
        ),
        Output(
            "entropy",
            "The entropy of each row's probabilities, in nats; 0 for ignored rows.",
            on_device=("cross_entropy",),
        ),
        Output(
            "predicted",
            "The entry with the largest logit of each row, the first one of several; -1 for ignored rows.",
            is_integer=True,
            has_gradient=False,
            on_device=("cross_entropy",),
        ),
        Output(
            "correct",
            "The number of rows whose target is the predicted entry, shape ().",
            is_integer=True,
            is_total=True,
            has_gradient=False,
            of_one_target=True,
            on_device=("cross_entropy",),
        ),
        Output(
            "prob",
            "The probabilities of the classes, in the shape and dtype of the logits; 0 for ignored rows.",
            has_gradient=False,  # no separate gradient: it is the softmax's
            is_of_logits=True,
        ),
        Output(
            "hessian_diag",
            "The diagonal of the Hessian of the loss with respect to the logits, times `grad_loss`, in the shape and "
            "dtype of the logits.",
            has_gradient=False,
            is_of_logits=True,
        ),
    )
}
#: The outputs of the loss of a linear layer. The loss of logits has all of `OUTPUTS`.
LAYER_OUTPUTS = {name: output for name, output in OUTPUTS.items() if not output.is_of_logits}

#: The options that are factors of terms with a separate divisor; see `has_own_divisor`.
WITH_OWN_DIVISOR = tuple(option.name for option in OPTIONS.values() if option.has_own_divisor)

#: Arguments with upstream gradients of outputs.
OUTPUT_GRADIENTS = tuple(f"grad_{name}" for name, output in OUTPUTS.items() if output.has_gradient)

#: The groups of parameters in signatures and documentation, in this order. Other parameters belong to the first group.
GROUPS: dict[str, tuple[str, ...]] = {
    "loss": (),
    "outputs": ("outputs",),
    "gradients": (
        *("grad_loss", *OUTPUT_GRADIENTS, "return_grad", "output_mask", "filter_eps"),
        *("reduce_input_grad", "reduce_weight_grad"),
    ),
    "memory and threads": ("out", "workspace_bytes", "deterministic", "backend", "num_threads"),
}


def largest_factor(is_double: bool) -> float:
    """Return the largest factor, and the reciprocal of the least divisor, of logits that are float64 or others."""
    return 2.0**500 if is_double else 2.0**60


def by_group(parameters: Iterable[str]) -> dict[str, list[str]]:
    """Return names of parameters by the title of their group."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in parameters:
        found[next((title for title, names in GROUPS.items() if name in names), "loss")].append(name)
    return found


def has_own_divisor(options: Mapping[str, Any]) -> bool:
    """Return whether a loss has a term that a mean divides only by the sum of the token weights.

    A tensor counts as one, as reading its value may wait for a device.
    """
    values = [options.get(name, 0.0) for name in WITH_OWN_DIVISOR]
    return any(not isinstance(value, (int, float)) or value != 0 for value in values)


def needs_entropy(outputs: Collection[str], options: Mapping[str, Any]) -> bool:
    """Return whether outputs of a loss, or its gradients with these options, depend on the entropy of the rows."""
    if "entropy" in outputs or options.get("grad_entropy") is not None:
        return True
    for option in OPTIONS.values():  # noqa: SIM110  (torch.compile does not trace the closure of a generator here)
        if option.needs_entropy and is_given(option, options):
            return True
    return False


def statistics_for_backward(outputs: Collection[str], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the outputs that `linear_cross_entropy_backward` needs for the gradients of these outputs."""
    if not any(OUTPUTS[name].has_gradient for name in outputs):
        return ()
    return ("lse", "entropy") if needs_entropy(outputs, options) else ("lse",)


def is_zero(probabilities: object) -> bool:
    """Return whether probabilities of targets are given as the number 0, which stands for an array of zeros."""
    if isinstance(probabilities, np.generic) or (type(probabilities) is np.ndarray and probabilities.ndim == 0):
        probabilities = probabilities.tolist()  # Python's own number
    return type(probabilities) in (int, float) and probabilities == 0


def is_given(option: Option, arguments: Mapping[str, Any]) -> bool:
    """Return whether an option of a validated call differs from its default."""
    default = option.default
    value = arguments.get(option.name, default)
    if value is default:
        return False
    return default is None or not isinstance(value, type(default)) or value != default


def given_options(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options of a validated call that differ from their defaults."""
    return [option.name for option in OPTIONS.values() if is_given(option, arguments)]
