"""The functions and classes of cut-cross-entropy, with their signatures."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch

from ...arguments import integer, shown, truth_value
from ...errors import ParamInvalidError, ParamTypeError
from .. import linear_loss as linear
from ..loss_operators import IGNORE_INDEX, check_reduction
from ..tensors import check_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..vocabulary_parallel import VocabularyShard

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyImpl",
    "VocabParallelOptions",
    "compute_z_loss",
    "linear_cross_entropy",
]

_NAME = "compat.cce.linear_cross_entropy"
_NAMES = linear.Names(_NAME, "e", "c", "targets", bias="bias")


class LinearCrossEntropyImpl(enum.IntEnum):
    """The implementations that cut-cross-entropy has. Here they differ only in the filter of the gradients.

    With `CCE` the arguments of the filter hold. All others are exact, whatever these arguments are.
    """

    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()
    CCE_KAHAN_FULL_C = enum.auto()
    CCE_KAHAN_FULL_E = enum.auto()
    CCE_EXACT = enum.auto()
    CCE_KAHAN_FULL_C_FULL_E = enum.auto()
    CCE_KAHAN_FULL = enum.auto()


#: Names of implementations with a filter. The second one exists in older releases of cut-cross-entropy only.
_FILTERED = ("cce", "cce_kahan")

_IMPLEMENTATIONS = (*_FILTERED, *(each.name.lower() for each in LinearCrossEntropyImpl if each.name != "CCE"))


@dataclass
class VocabParallelOptions:
    """The rows of the weight that this process holds, like ``cut_cross_entropy.VocabParallelOptions``.

    Parameters
    ----------
    start, stop : int
        The classes of this process, `stop` exclusive. Ranges follow each other in the order of the ranks.
    group : torch.distributed.ProcessGroup, optional
        The processes that the classes are split over; None is the default group.
    reduce_e_grad : bool, default True
        Only True is supported: every process gets the whole gradient of `e`.
    """

    start: int
    stop: int
    group: ProcessGroup | None = None
    reduce_e_grad: bool = True

    @classmethod
    def from_vocab(cls, vocab_size: int, group: ProcessGroup | None = None, reduce_e_grad: bool = True) -> Self:
        """Return the options of this process if the classes are split as evenly as possible.

        Parameters
        ----------
        vocab_size : int
            The number of classes of the whole weight.
        group, reduce_e_grad
            As in the class.

        Returns
        -------
        VocabParallelOptions
            Options with the range of `ascend_grad.parallel.vocab_range`.

        Raises
        ------
        ParamInvalidError
            161002: this process is not in the group, or `vocab_size` is not a positive int.
        """
        from ...parallel import vocab_range

        name = "compat.cce.VocabParallelOptions.from_vocab"
        if integer(vocab_size, "vocab_size", name) < 1:
            raise ParamInvalidError(f"vocab_size: expected 1 or more, got {shown(vocab_size)}", operator=name)
        if not torch.distributed.is_initialized():
            message = "group: expected a group, as torch.distributed has no default group"
            raise ParamInvalidError(message, operator=name)
        rank = torch.distributed.get_rank(group)
        if rank < 0:
            raise ParamInvalidError("group: expected a group that this process is in", operator=name)
        return cls(*vocab_range(vocab_size, rank, torch.distributed.get_world_size(group)), group, reduce_e_grad)


@overload
def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    shift: bool | int = 0,
    return_lse: Literal[False] = False,
    filter_eps: float | Literal["auto"] | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | enum.Enum | None = LinearCrossEntropyImpl.CCE,
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> torch.Tensor: ...


@overload
def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | Literal["auto"] | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | enum.Enum | None = LinearCrossEntropyImpl.CCE,
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | Literal["auto"] | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | enum.Enum | None = LinearCrossEntropyImpl.CCE,
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross-entropy loss of a linear layer, like ``cut_cross_entropy.linear_cross_entropy``.

    The logits are ``e @ c.T``, and the loss of a row is ``logsumexp(row) - row[target]``. By default,
    ``loss = linear_cross_entropy(e, c, targets)`` is the mean over the rows that are not ignored.

    Parameters
    ----------
    e : torch.Tensor, shape (..., H)
        The layer's input.
    c : torch.Tensor, shape (V, H)
        The layer's weight, of the dtype of `e`.
    targets : torch.Tensor of int64 or int32, shape (...)
        The class of each row of `e`, in [0, V), or `ignore_index`. On an Ascend NPU another value
        is no error: the row's loss and gradient of `e` and all of that of `c` are NaN.
    bias : torch.Tensor, shape (V,), optional
        The layer's bias.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    softcap : float, optional
        The bound of the logits, above 0: they are ``softcap * tanh(logits / softcap)``.
    reduction : {"mean", "sum", "none"}, default "mean"
        As in `ascend_grad.torch.linear_cross_entropy`: the mean is NaN if every row is ignored.
    shift : bool or int, default 0
        Row i predicts the target at i + shift in the last dimension of `targets`.
    return_lse : bool, default False
        Whether to also return the logarithm of the sum of the exponentials of each row's logits. It is differentiable.
    filter_eps : float, "auto" or None, default "auto"
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`. "auto" and None skip nothing: results are exact. Other
        implementations than "cce" ignore it.
    accum_e_fp32, accum_c_fp32 : bool, default False
        Ignored: sums are always in float32 or better.
    filter_e_grad, filter_c_grad : bool, default True
        Whether `filter_eps` applies to the gradients of `e` and of `c`. Unless both are True, both are exact.
    impl : LinearCrossEntropyImpl, or str, default LinearCrossEntropyImpl.CCE
        An implementation of cut-cross-entropy, or its name, in lower case. All implementations but "cce" are exact; the
        choice has no other effect. None means the default. An enumeration with the same names is also accepted.
    vocab_parallel_options : VocabParallelOptions, optional
        The rows of the weight that this process has: `c` and `bias` have only these rows; `targets` are classes of the
        whole weight.

    Returns
    -------
    loss : torch.Tensor
        The loss, float32, or float64 if `e` is float64. If `reduction` is "none" it has the shape of `targets`, whose
        last dimension is shorter by `shift`.
    lse : torch.Tensor
        Only with `return_lse`: one number for each row, 0 for ignored rows, in the dtype of `loss` and the shape that
        it has without a reduction.

    Raises
    ------
    NotImplementedError
        A keyword is not supported.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.cce import linear_cross_entropy
    >>> linear_cross_entropy(torch.zeros(2, 5, 3), torch.zeros(8, 3), torch.zeros(2, 5, dtype=torch.int64), shift=1)
    tensor(2.0794)
    """
    shard = None if vocab_parallel_options is None else _shard(vocab_parallel_options)
    function = _loss_over_group if shard is not None and torch.compiler.is_compiling() else _loss
    with_lse = linear.checked(shard, partial(truth_value, return_lse, "return_lse", _NAME))
    options = {"bias": bias, "softcap": softcap, "outputs": ("lse",) if with_lse else ()}
    name = _implementation(impl)
    are_filtered = (
        name in _FILTERED and filter_e_grad and filter_c_grad and filter_eps is not None and filter_eps != "auto"
    )
    return function(
        e, c, targets, reduction, ignore_index, shift, options, filter_eps if are_filtered else 0.0, name,
        vocab_parallel_options, shard
    )  # fmt: skip


def _shard(options: VocabParallelOptions) -> VocabularyShard:
    from ..vocabulary_parallel import VocabularyShard

    if not isinstance(options, VocabParallelOptions):
        expected = "None or ascend_grad.torch.compat.cce.VocabParallelOptions"
        raise ParamTypeError(f"vocab_parallel_options: expected {expected}, got {shown(options)}", operator=_NAME)
    group = torch.distributed.group.WORLD if options.group is None else options.group
    if group is None:
        message = "vocab_parallel_options: expected a group, as torch.distributed has no default group"
        raise ParamInvalidError(message, operator=_NAME)
    return VocabularyShard(group, options.start, None)


def _loss(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int,
    shift: bool | int,
    options: dict[str, Any],
    filter_eps: Any,
    impl: object,
    vocab_parallel_options: VocabParallelOptions | None,
    shard: VocabularyShard | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    def check() -> int:
        _check_implementation(impl)
        integer(ignore_index, "ignore_index", _NAME)
        check_tensors(_NAME, e=e, c=c, targets=targets)
        if vocab_parallel_options is not None:
            _check_vocab_parallel(c, vocab_parallel_options)
        return _checked_shift(e, targets, shift)

    shift = linear.checked(shard, check)
    if shift:
        length = targets.shape[-1] - shift
        e, targets = e[..., :length, :], targets[..., shift:]
    found = linear.unrounded_loss(
        e.reshape(-1, e.shape[-1]), c, targets.reshape(-1), reduction, ignore_index, options,
        filter_eps=filter_eps, shard=shard, names=_NAMES,
    )  # fmt: skip
    loss = found["loss"].reshape(targets.shape) if reduction == "none" else found["loss"]
    return (loss, found["lse"].reshape(targets.shape)) if "lse" in found else loss


_loss_over_group = torch._disable_dynamo(_loss)  # see `_rounded_loss_over_group` of `ascend_grad.torch.linear`


def _implementation(impl: object) -> object:
    """Return the name of an implementation. Whatever is none is returned unchanged."""
    if impl is None:
        return "cce"
    return impl.name.lower() if isinstance(impl, enum.Enum) else impl


def _check_implementation(name: object, operator: str = _NAME) -> None:
    if name not in _IMPLEMENTATIONS:
        expected = f"None or one of {', '.join(_IMPLEMENTATIONS)}"
        raise ParamInvalidError(f"impl: expected {expected}, got {shown(name)}", operator=operator)


def _check_vocab_parallel(c: torch.Tensor, given: VocabParallelOptions) -> None:
    linear.refuse(f"{_NAME} with vocab_parallel_options", reduce_e_grad=None if given.reduce_e_grad else False)
    if c.dim() == 2 and c.shape[0] != given.stop - given.start:
        message = f"c: expected {given.stop - given.start} rows (stop - start), got {c.shape[0]}"
        raise ParamInvalidError(message, operator=_NAME)


def _checked_shift(e: torch.Tensor, targets: torch.Tensor, shift: object) -> int:
    if e.dim() < 1 or targets.shape != e.shape[:-1]:
        message = f"targets: expected the shape of e without its last dimension, {tuple(e.shape[:-1])}, got "
        raise ParamInvalidError(f"{message}{tuple(targets.shape)}", operator=_NAME)
    return _shift_of(targets, shift, _NAME)


def _shift_of(targets: torch.Tensor, shift: object, operator: str) -> int:
    shift = int(shift) if isinstance(shift, (bool, int)) else integer(shift, "shift", operator)
    length = targets.shape[-1] if targets.dim() else 0
    if shift and not 0 <= shift < length:
        message = f"shift: expected an int in [0, {length}), got {shown(shift)}"
        raise ParamInvalidError(message, operator=operator)
    return shift


class LinearCrossEntropy(torch.nn.Module):
    """The cross-entropy loss of a linear layer as a module, like ``cut_cross_entropy.LinearCrossEntropy``.

    Parameters
    ----------
    ignore_index, softcap, reduction, shift, filter_eps, accum_e_fp32, accum_c_fp32, filter_e_grad, filter_c_grad
        As in `linear_cross_entropy`.
    impl, return_lse
        As in `linear_cross_entropy`.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.cce import LinearCrossEntropy
    >>> LinearCrossEntropy(reduction="sum")(torch.zeros(2, 3), torch.zeros(8, 3), torch.tensor([7, 0]))
    tensor(4.1589)
    """

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        softcap: float | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        shift: bool | int = 0,
        filter_eps: float | Literal["auto"] | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: str | enum.Enum | None = LinearCrossEntropyImpl.CCE,
        return_lse: bool = False,
    ):
        name = "compat.cce.LinearCrossEntropy"
        integer(ignore_index, "ignore_index", name)
        check_reduction(name, reduction)
        _check_implementation(_implementation(impl), name)
        truth_value(return_lse, "return_lse", name)
        super().__init__()
        self.ignore_index = ignore_index
        self.softcap = softcap
        self.reduction = reduction
        self.shift = shift
        self.filter_eps = filter_eps
        self.accum_e_fp32 = accum_e_fp32
        self.accum_c_fp32 = accum_c_fp32
        self.filter_e_grad = filter_e_grad
        self.filter_c_grad = filter_c_grad
        self.impl = impl
        self.return_lse = return_lse

    def forward(
        self,
        e: torch.Tensor,
        c: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None = None,
        vocab_parallel_options: VocabParallelOptions | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, as `linear_cross_entropy` does.

        Parameters
        ----------
        e, c, targets, bias, vocab_parallel_options
            As in `linear_cross_entropy`.

        Returns
        -------
        torch.Tensor, or a pair of them
            The loss, and with `return_lse` the logarithm of the sum of the exponentials of each row's logits.
        """
        return linear_cross_entropy(
            e,
            c,
            targets,
            bias,
            self.ignore_index,
            self.softcap,
            self.reduction,
            self.shift,
            self.return_lse,
            self.filter_eps,
            self.accum_e_fp32,
            self.accum_c_fp32,
            self.filter_e_grad,
            self.filter_c_grad,
            self.impl,
            vocab_parallel_options,
        )


def compute_z_loss(
    lse: torch.Tensor,
    targets: torch.Tensor | None = None,
    shift: bool | int = False,
    ignore_index: int = IGNORE_INDEX,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Compute the squares of `lse`, their mean or sum, like ``cut_cross_entropy.utils.compute_z_loss(lse, targets)``.

    Parameters
    ----------
    lse : torch.Tensor, shape (...)
        What `linear_cross_entropy` returns with `return_lse`.
    targets : torch.Tensor, optional
        The targets of that call. Rows whose target is `ignore_index` count as 0, and are not in the mean.
    shift : bool or int, default False
        The shift of that call.
    ignore_index : int, default -100
        The `ignore_index` of that call.
    reduction : {"mean", "sum", "none"}, default "mean"
        The mean is NaN if every row is ignored.

    Returns
    -------
    torch.Tensor
        In the dtype of `lse`.

    Raises
    ------
    ParamInvalidError
        161002: `reduction` or the shape of `targets` is not as described.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.cce import compute_z_loss, linear_cross_entropy
    >>> targets = torch.tensor([1, -100])
    >>> loss, lse = linear_cross_entropy(torch.zeros(2, 3), torch.zeros(8, 3), targets, return_lse=True)
    >>> compute_z_loss(lse, targets)
    tensor(4.3241)
    """
    name = "compat.cce.compute_z_loss"
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=name)
    check_tensors(name, lse=lse)
    squares = lse**2
    if targets is None:
        return squares if reduction == "none" else squares.mean() if reduction == "mean" else squares.sum()
    check_tensors(name, lse=lse, targets=targets)
    shift = _shift_of(targets, shift, name)
    counted = (targets[..., shift:] if shift else targets) != ignore_index
    if counted.shape != lse.shape:
        message = f"targets: expected shape {tuple(lse.shape)}, as lse has, after the shift, got {tuple(counted.shape)}"
        raise ParamInvalidError(message, operator=name)
    squares = torch.where(counted, squares, 0)
    if reduction == "none":
        return squares
    return squares.sum() / counted.sum() if reduction == "mean" else squares.sum()
