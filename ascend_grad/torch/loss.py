"""The linear cross-entropy loss as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
import torch

from ..arguments import integer, shown
from ..errors import AscendGradError, ParamInvalidError, rename
from ..inspection import bound_call
from ..operators.options import OPTIONS
from ..operators.results import LossResult
from ..operators.signatures import Words, completed, options_of, with_options
from .linear import linear_cross_entropy
from .linear_loss import check_shape
from .loss_operators import IGNORE_INDEX, ROWS_OF
from .tensors import refuse_other_class

if TYPE_CHECKING:
    from torch.nn import LinearCrossEntropyLoss as _Module
    from torch.nn import LinearCrossEntropyOptions

    from ..option_types import ModelOptions, Outputs
elif hasattr(torch.nn, "LinearCrossEntropyLoss"):
    _Module = torch.nn.LinearCrossEntropyLoss
else:

    class _Module(torch.nn.Module):
        """A substitute for `torch.nn.LinearCrossEntropyLoss` before torch 2.13: its attributes and its state's keys."""

        def __init__(
            self, in_features, num_classes, *, out_features, bias, device, dtype, reduction, weight, ignore_index,
            label_smoothing, options
        ):  # fmt: skip
            super().__init__()
            self.register_buffer("weight", weight)
            self.reduction = reduction
            self.num_classes = num_classes
            self.out_features = out_features
            self.ignore_index = ignore_index
            self.label_smoothing = label_smoothing
            rows = math.prod(out_features, start=num_classes)
            self.linear = torch.nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)
            self.options = options

        def extra_repr(self):
            names = "num_classes", "out_features", "bias", "reduction", "ignore_index", "label_smoothing", "options"
            values = vars(self) | {"bias": self.linear.bias is not None}
            return ", ".join([f"in_features={self.linear.in_features}", *(f"{name}={values[name]}" for name in names)])


def check_options(operator: str, **options: object) -> None:
    """Check options of a module as a call does, with arrays of one element instead of its tensors.

    A compiler cannot trace the checks. The calls of modules that are made in a compiled function check the options.
    """
    if torch.compiler.is_compiling():
        return
    arrays = {"input": np.zeros((1, 1)), "weight": np.zeros((1, 1)), "target": np.zeros(1, np.int64)}
    try:
        bound_call("linear_cross_entropy", (), {**arrays, **options, "backend": "cpu"})
    except AscendGradError as error:
        rename(error, operator, {})
        raise


def _length(value: object, name: str) -> int:
    """Return a dimension of a layer's weight as an int."""
    length = integer(value, name, "LinearCrossEntropyLoss")
    if length < 0:
        message = f"{name}: expected an int of at least 0, got {shown(length)}"
        raise ParamInvalidError(message, operator="LinearCrossEntropyLoss")
    return length


#: The options that belong to the model, which torch's module does not have.
_OPTIONS = {
    name: default
    for name, default in options_of(without=("label_smoothing", "denominator", "outputs")).items()
    if OPTIONS[name].is_number
}


@with_options(_OPTIONS, Words())
class LinearCrossEntropyLoss(_Module):
    """A linear layer with its cross-entropy loss, like `torch.nn.LinearCrossEntropyLoss`, but without logits in memory.

    ``loss = agt.LinearCrossEntropyLoss(in_features, num_classes)(input, target)`` is the mean over the rows by default.

    Parameters
    ----------
    in_features, num_classes : int
        The shape of the layer's weight, ``linear.weight``, is (num_classes, in_features).
    out_features : tuple of int, default ()
        The dimensions (d1, ...) of a loss of several ones. The weight then has num_classes * d1 * ... rows, in the
        order of a C-contiguous `linear_weight` of shape (num_classes, d1, ..., in_features).
    bias : bool, default False
        Whether the layer has a bias, ``linear.bias``, with an element for each row of the weight.
    device, dtype : optional
        The weight's device and dtype.
    reduction, weight, ignore_index, label_smoothing, options
        As in `linear_cross_entropy`.
    linear_weight : torch.nn.Parameter, of the shape of ``linear.weight``, optional
        The weight of another layer, such as an embedding, that this layer shares. `device` and `dtype` are ignored.
    .. options:: as in `linear_cross_entropy`
    outputs
        As in `linear_cross_entropy`.

    Raises
    ------
    NotImplementedError
        A keyword is not supported.
    ParamInvalidError
        161002: the shape of `linear_weight` or of `weight`, or an option, is not as described.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> embedding = torch.nn.Embedding(10, 4)
    >>> loss = agt.LinearCrossEntropyLoss(4, 10, linear_weight=embedding.weight)
    >>> loss(torch.zeros(2, 4), torch.tensor([3, 9])).detach()
    tensor(2.3026)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        weight: torch.Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: LinearCrossEntropyOptions | None = None,
        linear_weight: torch.nn.Parameter | None = None,
        outputs: Outputs = (),
        **further: Unpack[ModelOptions[torch.Tensor, float]],
    ):
        own = completed(further, _OPTIONS, "LinearCrossEntropyLoss")
        in_features = _length(in_features, "in_features")
        num_classes = _length(num_classes, "num_classes")
        if weight is not None:
            if not isinstance(weight, torch.Tensor):
                refuse_other_class("LinearCrossEntropyLoss", "weight", weight)
            check_shape("LinearCrossEntropyLoss", "weight", weight, (num_classes,), "one for each class")
        if not isinstance(out_features, Sequence) or not all(isinstance(n, int) and n > 0 for n in out_features):
            message = f"out_features: expected a tuple of positive ints, got {shown(out_features)}"
            raise ParamInvalidError(message, operator="LinearCrossEntropyLoss")
        if linear_weight is not None and not isinstance(linear_weight, torch.nn.Parameter):
            refuse_other_class("LinearCrossEntropyLoss", "linear_weight", linear_weight, "torch.nn.Parameter")
        check_options(
            "LinearCrossEntropyLoss",
            reduction=reduction,
            ignore_index=IGNORE_INDEX if ignore_index is None else ignore_index,
            label_smoothing=label_smoothing,
            outputs=outputs,
            **{name: each for name, each in own.items() if name not in ROWS_OF or not isinstance(each, torch.Tensor)},
        )
        super().__init__(
            in_features,
            num_classes,
            out_features=out_features,
            bias=bias,
            device=device if linear_weight is None else "meta",
            dtype=dtype,
            reduction=reduction,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=options,
        )
        for name, value in own.items():
            setattr(self, name, value)
        self.outputs = outputs
        if linear_weight is not None:
            if linear_weight.shape != self.linear.weight.shape:
                expected, got = tuple(self.linear.weight.shape), tuple(linear_weight.shape)
                message = f"linear_weight: expected shape {expected}, got {got}"
                raise ParamInvalidError(message, operator="LinearCrossEntropyLoss")
            self.linear.weight = linear_weight
            if bias:
                values = torch.empty(len(linear_weight), device=linear_weight.device, dtype=linear_weight.dtype)
                bound = in_features**-0.5 if in_features else 0.0  # as in torch.nn.Linear
                self.linear.bias = torch.nn.Parameter(torch.nn.init.uniform_(values, -bound, bound))

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        token_weight: torch.Tensor | None = None,
        target_prob: torch.Tensor | None = None,
        denominator: float | torch.Tensor | None = None,
    ) -> torch.Tensor | LossResult[torch.Tensor]:
        """Compute the loss.

        Parameters
        ----------
        input : torch.Tensor, shape (N, in_features) or (in_features,)
            The layer's input.
        target : torch.Tensor of an integer dtype, shape (N, ``*out_features``) or (); with `target_prob` (..., K)
            The class of each row, in [0, num_classes), or `ignore_index`.
        token_weight, target_prob, denominator
            As in `linear_cross_entropy`.

        Returns
        -------
        torch.Tensor or LossResult
            The loss. With `outputs` it is the field `loss` of a named tuple, and the outputs are other fields.
        """
        linear_weight, linear_bias = self.linear.weight, self.linear.bias
        if self.out_features:
            rows = self.num_classes, *self.out_features
            linear_weight = linear_weight.unflatten(0, rows)
            linear_bias = None if linear_bias is None else linear_bias.unflatten(0, rows)
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            token_weight=token_weight,
            target_prob=target_prob,
            denominator=denominator,
            outputs=self.outputs,
            **{name: getattr(self, name) for name in _OPTIONS},
        )

    def extra_repr(self) -> str:
        """Describe the module as torch does, with the options of this library that differ from their defaults.

        Returns
        -------
        str
        """
        defaults = {**_OPTIONS, "outputs": ()}
        own = (f"{name}={vars(self)[name]}" for name, default in defaults.items() if vars(self)[name] != default)
        return ", ".join([super().extra_repr(), *own])
