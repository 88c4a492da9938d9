"""Named tuples that calls with several results return.

The type of a result that depends on the arguments contains Any: the result is None if it was not requested. A caller
who requested it need not tell a type checker that it is not None.
"""

from __future__ import annotations

from abc import ABCMeta
from collections import namedtuple
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from numpy.typing import NDArray

from .options import OUTPUTS

#: The class of the result of a function of arrays: that of `out`, if it is given.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # in `typing` from Python 3.13 on

    Result = TypeVarWithDefault("Result", default=NDArray)
else:  # for `typing.get_type_hints`
    Result = TypeVar("Result")

#: The class of the arrays, of NumPy or of another library.
Array = TypeVar("Array")
#: A class of named tuples.
_Tuple = TypeVar("_Tuple", bound=tuple)


def _refused(result: Any, *_: object) -> NoReturn:
    """Refuse arithmetic: tuples would be repeated by ``2 * result``."""
    advice = "use its field .loss" if hasattr(result, "loss") else "use its fields, which are arrays"
    fields = ", ".join(result._fields)
    raise TypeError(f"a {type(result).__name__} is a named tuple ({fields}), not a number; {advice}")


def _added(result: Any, other: object) -> tuple:
    """Return the concatenation with a plain tuple, and refuse everything else: two results may be meant as numbers."""
    return tuple(result) + other if type(other) is tuple else _refused(result)


def _added_to(result: Any, other: object) -> tuple:
    """Return the concatenation of a plain tuple with the result. Python asks the class of the result before tuple."""
    return other + tuple(result) if type(other) is tuple else _refused(result)


_ARITHMETIC = (
    *("__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__neg__"),
    *("__imul__", "__isub__", "__itruediv__", "__pow__", "__matmul__"),
)
#: Without `__array_ufunc__`, NumPy's numbers would compute with the tuple as an array.
_METHODS = {"__add__": _added, "__radd__": _added_to, "__array_ufunc__": None, **dict.fromkeys(_ARITHMETIC, _refused)}


def _without_arithmetic(cls: type[_Tuple]) -> type[_Tuple]:
    """Make a class of named tuples refuse arithmetic. Its one base remains tuple."""
    for name, method in _METHODS.items():
        setattr(cls, name, method)
    return cls


@_without_arithmetic
class OnlineMaxSum(NamedTuple):
    """Statistics of the logits of one vocabulary shard; see `ascend_grad.fused_linear_online_max_sum`.

    The three numbers of each row are float32, or float64 if the inputs are float64.
    """

    #: The largest logit of each row, shape (BT,).
    logits_max: NDArray
    #: The sum of exp(logit - logits_max), shape (BT,).
    sum_exp_logits: NDArray
    #: The target's logit - logits_max, or 0 if the target lives in another shard, shape (BT,).
    predicted_logits: NDArray
    #: A bit for each row, 1 if the target lives in another shard: uint8, shape ((BT + 7) // 8,).
    target_mask: NDArray
    #: The target's row of this shard, or 0 if the target lives in another shard, shape (BT,).
    masked_target: NDArray
    #: The logits in input's dtype, shape (BT, V), or None if not requested.
    vocab_parallel_logits: NDArray | Any


@_without_arithmetic
class LinearTopK(NamedTuple, Generic[Array]):
    """The largest log-probabilities of each row, from the largest down; see `ascend_grad.linear_top_k`."""

    #: The log-probabilities, shape (..., k); float32, or float64 if the inputs are float64.
    log_prob: Array
    #: Their vocabulary entries, rows of weight: int64, shape (..., k).
    index: Array  # type: ignore[assignment]  # hides the method of tuples


@_without_arithmetic
class LinearCrossEntropyGradients(NamedTuple):
    """Gradients of `ascend_grad.linear_cross_entropy_backward`. A gradient that is not requested is None."""

    #: The gradient with respect to input, shape (BT, H), in its dtype.
    input_grad: NDArray | Any
    #: The gradient with respect to weight, shape (V, H), in its dtype.
    weight_grad: NDArray | Any
    #: The gradient with respect to bias, shape (V,), in its dtype; None without a bias.
    bias_grad: NDArray | Any


@_without_arithmetic
class LinearHessianProduct(NamedTuple):
    """The product of a Hessian and a vector; see `ascend_grad.linear_cross_entropy_hvp`."""

    #: The part that belongs to weight, shape (V, H), in its dtype.
    weight_product: NDArray
    #: The part that belongs to bias, shape (V,), in its dtype; None without a bias.
    bias_product: NDArray | Any
    #: The part that belongs to input, in its shape and dtype; None without `vector_input`.
    input_product: NDArray | Any


class LossResult(tuple[Array, ...], metaclass=ABCMeta):
    """The result of a loss: the loss, its gradients, and the requested outputs in the order of the request.

    A result is a named tuple. Its fields are `loss`, the gradients in functions that return any, and the outputs. A
    gradient that is not requested is None. An output that is not requested is no field, and None as an attribute. There
    is a class of named tuples for each sequence of fields; this class is their abstract base, so that
    ``isinstance(result, LossResult)`` is True for all.

    Numbers of rows are float32, or float64 if the input is float64. Integers are int64. Results of the shape of an
    argument have its dtype.
    """

    #: The loss, shape () for a mean or a sum, otherwise one number for each row.
    loss: Array
    #: The gradient with respect to the input, in its shape and dtype.
    input_grad: Array | Any = None
    #: The gradient with respect to the weight of a linear layer, in its shape and dtype.
    weight_grad: Array | Any = None
    #: The gradient with respect to the bias of a linear layer, in its shape and dtype.
    bias_grad: Array | Any = None
    #: The logarithm of the sum of the exponentials of each row's logits; 0 for ignored rows.
    lse: Array | Any = None
    #: The log-probability of each target, also of several in a row; 0 for ignored targets.
    log_prob: Array | Any = None
    #: The entropy of each row's probabilities, in nats; 0 for ignored rows.
    entropy: Array | Any = None
    #: The entry with the largest logit of each row, the first one of several; -1 for ignored rows.
    predicted: Array | Any = None
    #: The number of rows whose target is the predicted entry, shape ().
    correct: Array | Any = None
    #: The probabilities of the classes, in the shape and dtype of the logits; 0 for ignored rows.
    prob: Array | Any = None
    #: The diagonal of the Hessian of the loss with respect to the logits, in their shape and dtype.
    hessian_diag: Array | Any = None

    def __new__(cls, loss: Array, **others: Array | None) -> LossResult[Array]:
        """Return a named tuple of the loss and of the other results, in the order in which they are given."""
        return loss_result(("loss", *others), (loss, *others.values()))


_NAMES = ("loss", "input_grad", "weight_grad", "bias_grad", *OUTPUTS)
_CLASSES: dict[tuple[str, ...], type] = {}


def class_of(names: tuple[str, ...]) -> type:
    """Return the class of results with these fields."""
    cls: Any = _CLASSES.get(names)
    if cls is None:
        make: Any = namedtuple  # type checkers accept only constant names
        cls = make("LossResult", names)
        for name in _NAMES:
            if name in names and name in OUTPUTS:
                getattr(cls, name).__doc__ = OUTPUTS[name].text
            elif name not in names:
                setattr(cls, name, None)
        cls.__doc__ = LossResult.__doc__
        cls.__reduce__ = _reduced
        # `torch.vmap` accepts only named tuples whose one base is tuple.
        _CLASSES[names] = LossResult.register(_without_arithmetic(cls))
    return cls


def loss_result(names: tuple[str, ...], values: Iterable[Any]) -> Any:
    """Return values as a named tuple with these fields."""
    return tuple.__new__(class_of(names), values)


def _reduced(result: Any) -> tuple:
    """Return how a result is pickled, as its class has no name in this module."""
    return loss_result, (result._fields, tuple(result))
