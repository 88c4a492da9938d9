"""Compare row-wise functions with torch's own: values, gradients, layouts, modes, batches, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_oracles import TOLERANCES, assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt

SOFTMAXES = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


def masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute `scaled_masked_softmax` by torch's functions."""
    return torch.softmax((x * scale).masked_fill(mask, -10000.0), -1)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Draw a tensor of any rank up to 5 and any layout, and one of the tensor's dimensions."""
    shape = draw(st.lists(st.integers(0, 6), max_size=5))
    rank = len(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = draw(st.permutations(range(rank)))
    step = draw(st.integers(1, 2))
    stored = torch.randn([shape[axis] * step for axis in order], generator=generator, dtype=torch.float64).to(dtype)
    stored = stored[tuple(slice(None, None, step) for _ in order)]
    x = stored.permute([order.index(axis) for axis in range(rank)])
    assert list(x.shape) == shape
    return x, draw(st.integers(-max(rank, 1), max(rank, 1) - 1))


@pytest.mark.parametrize("name", SOFTMAXES)
@given(data=st.data())
def test_values_and_gradients(name: str, dtype: torch.dtype, data: st.DataObject):
    x, dim = data.draw(tensors(dtype))
    grad_output = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    value, grad = value_and_gradients(lambda x: getattr(agt, name)(x, dim), [x], grad_output)
    assert value.dtype == grad.dtype == dtype
    assert value.shape == grad.shape == x.shape
    assert value.is_contiguous()
    assert_close(value, SOFTMAXES[name](x.double(), dim), dtype)
    # The expected gradient is computed at the returned value, which is rounded to the dtype.
    backward = {"softmax": torch._softmax_backward_data, "log_softmax": torch._log_softmax_backward_data}[name]
    right = backward(grad_output.double(), value.double(), dim, torch.float64)
    assert_close(grad, right, dtype, steps=2)


@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (1, 1, 4, 5)], ids=str)
def test_masked_values_and_gradients(mask_shape: tuple[int, ...], dtype: torch.dtype):
    x, grad_output = torch.randn(2, 3, 4, 5).to(dtype), torch.randn(2, 3, 4, 5).to(dtype)
    mask = torch.rand(mask_shape) < 0.5
    mask[..., 0, :] = True
    value, grad = value_and_gradients(lambda x: agt.scaled_masked_softmax(x, mask, 0.5), [x], grad_output)
    right_value, right_grad = value_and_gradients(lambda x: masked(x, mask, 0.5), [x.double()], grad_output.double())
    assert value.dtype == grad.dtype == dtype
    assert_close(value, right_value, dtype)
    assert_close(grad, right_grad, dtype, steps=4)  # the gradient is computed from a rounded value
    assert torch.all(grad[mask.expand_as(grad)] == 0)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_two_orders(name: str, shape: tuple[int, ...]):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        assert torch.autograd.gradcheck(getattr(agt, name), (x, dim))
        assert torch.autograd.gradgradcheck(getattr(agt, name), (x, dim))


@pytest.mark.parametrize("scale", [1.0, -0.7, 0.0])
def test_two_orders_of_masked(scale: float):
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 2, 3, 4) < 0.4
    mask[..., 0, :] = True
    assert torch.autograd.gradcheck(agt.scaled_masked_softmax, (x, mask, scale))
    assert torch.autograd.gradgradcheck(agt.scaled_masked_softmax, (x, mask, scale))


@pytest.mark.parametrize("name", SOFTMAXES)
def test_three_orders(name: str):
    x = torch.randn(4, dtype=torch.float64)

    def third(function) -> torch.Tensor:
        grad = x.clone().requires_grad_()
        derivative = function(grad, 0)[1]
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), grad, create_graph=True)
            derivative = derivative[2]
        return derivative

    assert_close(third(getattr(agt, name)), third(SOFTMAXES[name]), torch.float64, steps=100)


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_batches(name: str, in_dim: int, dim: int):
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = torch.vmap(lambda row: getattr(agt, name)(row, dim), in_dims=in_dim)(x)
    assert_close(ours, torch.vmap(lambda row: SOFTMAXES[name](row, dim), in_dims=in_dim)(x), torch.float64)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_batches_of_scalars_and_batches_in_batches(name: str):
    ours, torchs = getattr(agt, name), SOFTMAXES[name]
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    of_scalars = torch.vmap(lambda each: ours(each, 0))(x[0, 0])
    assert_close(of_scalars, torch.full((5,), name == "softmax", dtype=x.dtype), x.dtype)
    assert_close(torch.vmap(torch.vmap(ours))(x), torchs(x, -1), x.dtype)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_batches_of_gradients(name: str):
    """Per-sample gradients and Jacobians equal torch's own.

    Backward of a Jacobian has a batch of upstream gradients, and an output without a batch.
    """
    ours, torchs = getattr(agt, name), SOFTMAXES[name]
    x = torch.randn(3, 4, dtype=torch.float64)
    each = [torch.vmap(torch.func.grad(lambda row: f(row, -1)[1]))(x) for f in (ours, torchs)]  # noqa: B023
    assert_close(*each, x.dtype)
    assert_close(torch.func.jacrev(ours)(x), torch.func.jacrev(lambda x: torchs(x, -1))(x), x.dtype)
    both = [torch.func.jacrev(torch.func.jacrev(lambda row: f(row, -1)))(x[0]) for f in (ours, torchs)]  # noqa: B023
    assert_close(*both, x.dtype, steps=10)


@pytest.mark.parametrize("mask_dim", [None, 0, 4])
@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 3, 4, 5), (1, 1, 4, 5)], ids=str)
def test_batches_of_masked(mask_dim: int | None, mask_shape: tuple[int, ...]):
    x = torch.randn(2, 3, 6, 4, 5, dtype=torch.float64)
    mask = torch.rand(mask_shape if mask_dim is None else (6, *mask_shape)) < 0.4
    mask = mask if mask_dim is None else mask.movedim(0, mask_dim)

    def batched(function) -> torch.Tensor:
        grad = torch.func.grad(lambda x, mask: function(x, mask, 2.0)[..., 0].sum())
        return torch.vmap(grad, in_dims=(2, mask_dim))(x, mask)

    assert_close(batched(agt.scaled_masked_softmax), batched(masked), x.dtype, steps=10)


def test_batches_are_checked():
    x = torch.randn(3, 4, 5)
    with pytest.raises(ag.ParamInvalidError, match=r"softmax: dim: expected an int in \[-2, 1\], got -3"):
        torch.vmap(lambda row: agt.softmax(row, -3))(x)
    with pytest.raises(ag.ParamInvalidError, match="scaled_masked_softmax: x: expected rank 4"):
        torch.vmap(agt.scaled_masked_softmax, in_dims=(0, None))(x, torch.zeros(1, 1, 4, 5, dtype=torch.bool))


def test_modes():
    x = torch.randn(2, 3, requires_grad=True)
    assert agt.softmax(x).requires_grad
    assert not agt.softmax(x.detach()).requires_grad
    with torch.no_grad():
        assert not agt.softmax(x).requires_grad
    with torch.inference_mode():
        assert agt.softmax(x).is_inference()
    assert torch.equal(agt.softmax(x), agt.softmax(x.detach()))


@pytest.mark.parametrize("name", SOFTMAXES)
def test_autocast_gives_the_dtype_that_torch_gives(name: str, dtype: torch.dtype):
    x = torch.randn(2, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert getattr(agt, name)(x).dtype == SOFTMAXES[name](x, -1).dtype == dtype


def test_results_keep_their_memory_and_inputs_theirs():
    x = torch.randn(64, 64)
    before = x.clone()
    results = [agt.softmax(x) for _ in range(3)]
    del x
    for result in results:
        assert_close(result, torch.softmax(before.double(), -1), torch.float32)
    results[0].zero_()
    assert_close(results[1], torch.softmax(before.double(), -1), torch.float32)


def test_the_input_may_change_between_forward_and_backward_but_the_value_may_not():
    x = torch.randn(2, 3, requires_grad=True)
    y = agt.softmax(x)
    with torch.no_grad():
        x.zero_()
    (grad,) = torch.autograd.grad(y[0, 0], x, retain_graph=True)
    assert_close(grad[0, 0], (y[0, 0] * (1 - y[0, 0])).double(), torch.float32)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y[0, 0], x)


def test_values_of_a_lazy_view():
    """A call on a lazily negated view returns the right values."""
    x = torch.complex(torch.zeros(4), torch.randn(4)).conj().imag
    assert x.is_neg()
    assert_close(agt.softmax(x), torch.softmax(x.double(), -1), torch.float32)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's jvp warns
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*:UserWarning")
@pytest.mark.parametrize("function", [agt.softmax, agt.log_softmax])
def test_errors(function):
    name = function.__name__
    x = torch.zeros(2, 3)
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a torch.Tensor, got None"):
        function(None)
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a torch.Tensor, got ndarray"):
        function(np.zeros(3))
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected dtype float32, .* got int64"):
        function(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a dense .* torch.sparse_coo"):
        function(x.to_sparse())
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a dense .* quantized"):
        function(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
    with pytest.raises(ag.ParamInvalidError, match=f"{name}: dim: "):
        function(x, 2)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (x,), (x,))


def test_errors_of_masked():
    x, mask = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    with pytest.raises(ag.ParamTypeError, match="scaled_masked_softmax: mask: "):
        agt.scaled_masked_softmax(x, mask.float())
    with pytest.raises(ag.ParamInvalidError, match="scaled_masked_softmax: mask: "):
        agt.scaled_masked_softmax(x, mask[..., :2])
    with pytest.raises(ag.ParamTypeError, match=r"scaled_masked_softmax: mask: expected a torch.Tensor, got None"):
        agt.scaled_masked_softmax(x, None)


def test_tensors_elsewhere():
    """A call on tensors without memory ("meta") returns shape and dtype, as torch's own functions do."""
    result = agt.softmax(torch.empty(2, 3, device="meta", dtype=torch.bfloat16))
    assert (result.device.type, result.shape, result.dtype) == ("meta", (2, 3), torch.bfloat16)
    assert set(TOLERANCES) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}


# ---- calls with and without torch's dispatcher -----------------------------------------------------------------------


def test_plain_calls_go_past_the_dispatcher(monkeypatch):
    """A call that is neither traced nor transformed bypasses torch's dispatcher.

    The test fails if a version of torch lacks the private functions that detect tracing and transforms.
    """

    def seen(*_):
        raise AssertionError("a plain call came to the dispatcher")

    for name in ("softmax", "softmax_backward"):
        monkeypatch.setattr(torch.ops.ascend_grad, name, seen)
    x = torch.nn.Parameter(torch.randn(3, 4))
    agt.softmax(x).sum().backward()
    assert x.grad is not None


class Operators(TorchDispatchMode):
    """Record the names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Record the names of the functions that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_what_looks_on_sees_the_operators():
    x = torch.randn(3, 4, requires_grad=True)
    with Operators() as operators:
        agt.softmax(x).sum().backward()
    assert {"ascend_grad::softmax", "ascend_grad::softmax_backward"} <= set(operators.names)
    with Functions() as functions:
        agt.softmax(x)
    assert "ascend_grad.softmax" in functions.names
    traced = make_fx(lambda x: agt.softmax(2 * x))(x.detach())
    assert "torch.ops.ascend_grad.softmax" in traced.code
    other = torch.randn(3, 4)
    assert torch.equal(traced(other), agt.softmax(2 * other))
    assert torch.equal(torch.jit.trace(lambda x: agt.softmax(2 * x), x.detach())(other), agt.softmax(2 * other))
    fake = FakeTensorMode().from_tensor(x.detach())
    assert type(agt.softmax(fake)) is type(fake)


def test_gradients_after_a_transform_has_ended():
    """The function that `torch.func.vjp` returns gives right gradients, although the transform has already ended."""
    x, above = torch.randn(3), torch.randn(3)
    _, backward = torch.func.vjp(agt.softmax, x)
    (grad,) = backward(above)
    assert not grad.requires_grad
    torch.testing.assert_close(grad, torch.func.vjp(lambda x: torch.softmax(x, -1), x)[1](above)[0])
    found = []
    for function in (agt.softmax, lambda x: torch.softmax(x, -1)):
        outer = x.clone().requires_grad_()
        _, backward = torch.func.vjp(function, outer)
        (backward(above)[0] ** 2).sum().backward()
        found.append(outer.grad)
    torch.testing.assert_close(*found)
    _, backward = torch.func.vjp(lambda x: agt.scaled_masked_softmax(x, x > 0), torch.randn(1, 1, 2, 3))
    assert backward(torch.ones(1, 1, 2, 3))[0].shape == (1, 1, 2, 3)


def test_tensors_without_memory_of_their_own():
    assert torch.equal(agt.softmax(torch._efficientzerotensor((3, 4))), torch.full((3, 4), 0.25))
    negative = torch.imag(torch.conj(torch.randn(3, dtype=torch.cfloat)))
    assert torch.equal(agt.softmax(negative), agt.softmax(negative.clone()))


def test_a_batch_of_scales():
    x, mask = torch.randn(3, 2, 3, 4, 5), torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
    scales = torch.tensor([0.5, 2.0, -1.0])
    together = torch.vmap(agt.scaled_masked_softmax, in_dims=(0, None, 0))(x, mask, scales)
    torch.testing.assert_close(together, masked(x, mask, scales.reshape(3, 1, 1, 1, 1)))
    with pytest.raises(ag.ParamTypeError, match=r"scale: expected a real number, got"):
        agt.scaled_masked_softmax(x[0], mask, scales)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
def test_another_name_of_the_dimension(name: str):
    function, tensors = getattr(agt, name), [torch.rand(3, 4)] * (2 if name.endswith("backward") else 1)
    assert torch.equal(function(*tensors, axis=0), function(*tensors, dim=0))
    with pytest.raises(TypeError, match=rf"^{name}\(\) got dim and axis, which are two names of one argument"):
        function(*tensors, dim=0, axis=0)
    with pytest.raises(ag.ParamInvalidError, match=rf"^{name}: dim: expected a value in \[-2, 1\], got 2"):
        function(*tensors, axis=2)


def test_a_number_of_threads():
    x = torch.randn(300, 1000, requires_grad=True)
    mask = torch.zeros(1, 1, 300, 1000, dtype=torch.bool)
    assert torch.equal(agt.softmax(x, num_threads=1), agt.softmax(x, num_threads=2))
    masked_once = agt.scaled_masked_softmax(x[None, None], mask, 0.5, num_threads=1)
    assert torch.equal(masked_once, agt.scaled_masked_softmax(x[None, None], mask, 0.5))
    agt.log_softmax(x, num_threads=2).sum().backward()
    with pytest.raises(ag.ParamInvalidError, match="softmax: num_threads: expected"):
        agt.softmax(x, num_threads=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_refused(dtype: torch.dtype):
    x = torch.ones(1, 1, 2, 3).to(dtype)
    for call in (
        lambda: agt.softmax(x),
        lambda: agt.log_softmax(x),
        lambda: agt.scaled_masked_softmax(x, x.bool()),
        lambda: agt.cross_entropy(x[0, 0], torch.tensor([0, 1])),
        lambda: agt.linear_cross_entropy(x[0, 0], x[0, 0], torch.tensor([0, 1])),
    ):
        with pytest.raises(ag.ParamTypeError, match=r": expected dtype float32.*; .*\.float\(\) converts it"):
            call()
    assert torch.equal(agt.softmax(x, dtype=torch.float32), torch.full((1, 1, 2, 3), 1 / 3))


def test_a_scale_has_no_gradient():
    x, mask = torch.randn(1, 1, 2, 3), torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    with pytest.raises(ag.ParamTypeError, match="scale: expected a number, got a tensor that requires grad"):
        agt.scaled_masked_softmax(x, mask, torch.tensor(2.0, requires_grad=True))


# ---- the backward functions ------------------------------------------------------------------------------------------

BACKWARD_FUNCTIONS = {
    "softmax_backward": [(4, 3), (4, 3)],
    "log_softmax_backward": [(4, 3), (4, 3)],
    "scaled_masked_softmax_backward": [(2, 3, 4, 5), (2, 3, 4, 5)],
}


def backward_call(name: str) -> tuple[Callable, tuple]:
    """Return a backward function, and the function's arguments other than the two tensors."""
    mask = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
    return getattr(agt, name), (mask, 0.7) if name.startswith("scaled") else (0,)


@pytest.mark.parametrize("name", BACKWARD_FUNCTIONS)
def test_backward_functions_are_those_of_arrays(name: str, dtype: torch.dtype):
    function, others = backward_call(name)
    g, y = (torch.randn(shape).to(dtype) for shape in BACKWARD_FUNCTIONS[name])
    result = function(g, y, *others)
    assert torch.equal(result, getattr(ag, name)(g, y, *others))
    tensors = [torch.tensor(each, dtype=torch.float64) if isinstance(each, float) else each for each in others]
    assert torch.equal(getattr(torch.ops.ascend_grad, name)(g, y, *tensors, None), result)
    first, second = inspect.signature(getattr(ag, name)).parameters, inspect.signature(function).parameters
    assert set(second) == first.keys() - {"out", "backend"}
    of_torch = {"axis": "dim", "dim": "axis"}
    assert [second[of_torch.get(each, each)].default for each in first if each in second] == [
        first[each].default for each in first if each in second
    ]


@pytest.mark.parametrize("name", BACKWARD_FUNCTIONS)
def test_two_orders_of_backward_functions(name: str):
    function, others = backward_call(name)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in BACKWARD_FUNCTIONS[name]]
    assert torch.autograd.gradcheck(lambda g, y: function(g, y, *others), tensors)
    assert torch.autograd.gradgradcheck(lambda g, y: function(g, y, *others), tensors)


@pytest.mark.parametrize("name", BACKWARD_FUNCTIONS)
def test_errors_of_backward_functions(name: str):
    function, others = backward_call(name)
    g, y = (torch.randn(shape) for shape in BACKWARD_FUNCTIONS[name])
    with pytest.raises(ag.ParamTypeError, match=rf"^{name}: grad_output: expected a torch.Tensor, got None"):
        function(None, y, *others)
    with pytest.raises(ag.ParamTypeError, match=rf"^{name}: (output|y): expected dtype float32"):
        function(g, y.double(), *others)
    with pytest.raises(ag.ParamInvalidError, match=rf"^{name}: (output|y): expected shape"):
        function(g, y[:1], *others)


@pytest.mark.parametrize("name", ["scaled_masked_softmax", "scaled_masked_softmax_backward"])
def test_a_generated_mask_is_refused(name: str):
    x, mask = torch.randn(1, 1, 2, 3), torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    tensors = (x, mask) if name == "scaled_masked_softmax" else (x, x, mask)
    function = getattr(agt, name)
    assert torch.equal(function(*tensors, 0.5, False), function(*tensors, 0.5))
    for value, kind in ((True, ag.ParamInvalidError), (1, ag.ParamTypeError), (None, ag.ParamTypeError)):
        texts = []
        for module in (agt, ag):
            with pytest.raises(kind, match=rf"^{name}: fix_triu_mask: expected False") as error:
                getattr(module, name)(*tensors, 0.5, value)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
