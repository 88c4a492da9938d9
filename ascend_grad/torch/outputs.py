"""Results of the losses: a named tuple of the loss and its requested outputs."""

from __future__ import annotations

from abc import ABCMeta
from collections import namedtuple
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from ..arguments import OUTPUTS, shown
from ..errors import ParamInvalidError, ParamTypeError


class LossOutputs(tuple[Any, ...], metaclass=ABCMeta):
    """A loss and its requested outputs.

    A result is a named tuple, of which the first field is `loss`. An output that is not requested is no field, and None
    as an attribute. There is a class of named tuples for each set of outputs; this class is their abstract base, so
    that ``isinstance(result, LossOutputs)`` is True for all.

    Numbers are float32, or float64 if the input is float64. The rows' numbers are 0 for ignored rows.
    """

    # As in `ascend_grad.results`, a result that may be None has the type Any, too.
    #: The loss, shape () for a mean or a sum, otherwise one number for each row; in the dtype that torch gives it.
    loss: torch.Tensor
    #: The logarithm of the sum of the exponentials of each row's logits.
    lse: torch.Tensor | Any = None
    #: The log-probability of each target.
    log_prob: torch.Tensor | Any = None
    #: The entropy of each row's probabilities, in nats.
    entropy: torch.Tensor | Any = None
    #: The class with the largest logit of each row, int64, the first one of several; -1 for ignored rows.
    predicted: torch.Tensor | Any = None
    #: The number of rows whose target is the predicted class, int64, shape ().
    correct: torch.Tensor | Any = None

    def __new__(cls, loss: torch.Tensor, *args: torch.Tensor | None, **kwargs: torch.Tensor | None) -> LossOutputs:
        """Return a named tuple of the loss and of the outputs that are not None."""
        found = Computed(loss, *args, **kwargs)
        return requested(found, [name for name in OUTPUTS if getattr(found, name) is not None])


class Computed(NamedTuple):
    """The loss and its outputs. An output that is not requested is None."""

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    log_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    correct: torch.Tensor | None = None


def _class_with(names: tuple[str, ...]) -> type:
    cls = namedtuple("LossOutputs", ("loss", *names))  # type: ignore[misc]
    for name in OUTPUTS:
        if name not in names:
            setattr(cls, name, None)
    cls.__doc__ = LossOutputs.__doc__
    setattr(cls, "__reduce__", _reduced)  # noqa: B010 (assigning a method is no error then)
    return LossOutputs.register(cls)  # `torch.vmap` accepts only named tuples whose one base is tuple


def _reduced(outputs: Any) -> tuple:
    """Return how a result of `requested` is pickled, as its class has no name in this module."""
    return LossOutputs, tuple(Computed(**outputs._asdict()))


#: Named tuples of the loss and some outputs. `torch.vmap` refuses None in a field, so each set of outputs has its own.
_CLASSES = {names: _class_with(names) for count in range(len(OUTPUTS) + 1) for names in combinations(OUTPUTS, count)}


def requested(found: Computed, outputs: Sequence[str]) -> Any:
    """Return the loss and the outputs of these names. Other outputs are no fields, and None as attributes."""
    names = tuple(name for name in OUTPUTS if name in outputs)
    return _CLASSES[names](found.loss, *(getattr(found, name) for name in names))


def check_outputs(operator: str, outputs: object) -> None:
    """Refuse an argument that is not a sequence of names of outputs."""
    expected = f"a tuple of names among {', '.join(map(repr, OUTPUTS))}"
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(each, str) for each in outputs):
        raise ParamTypeError(f"outputs: expected {expected}, got {shown(outputs)}", operator=operator)
    for each in outputs:
        if each not in OUTPUTS:
            raise ParamInvalidError(f"outputs: expected {expected}, got {each!r}", operator=operator)


def computed_outputs(outputs: Sequence[str]) -> list[str]:
    """Return the names of the outputs to compute: backward through a log-probability or an entropy needs lse."""
    needs_lse = "lse" not in outputs and ("log_prob" in outputs or "entropy" in outputs)
    return [*outputs, "lse"] if needs_lse else list(outputs)


def statistics(
    outputs: Sequence[str], lse: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the outputs that backward through outputs needs, None for those that were not computed."""
    return lse if "lse" in outputs else None, entropy if "entropy" in outputs else None


def no_lse_error(operator: str) -> ParamInvalidError:
    """Return the error of backward through outputs that were computed without lse."""
    message = "outputs: expected 'lse' among them, as backward through outputs needs it"
    return ParamInvalidError(message, operator=operator)
