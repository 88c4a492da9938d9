"""Test PyTorch's tensors as arguments, results and `out` of the functions that take arrays of any library."""

from __future__ import annotations

import gc
import sys
import warnings

import numpy as np
import pytest
import torch
from array_calls import linear_results, rowwise_results
from faults import INVALID, TYPE, assert_refused_beside, outcome
from hypothesis import given
from hypothesis import strategies as st
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, problem_of
from python_threads import empty_on_threads
from samples import BFLOAT16, DTYPES, assert_identical, pairs_of_results, random_problem
from torch._subclasses import FakeTensorMode

import ascend_grad as ag


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Make a tensor of the same values, using only torch."""
    array = np.array(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def assert_same(results, expected) -> None:
    for result, right in pairs_of_results(results, expected):
        assert type(result) is torch.Tensor
        assert_identical(array_of(result), right)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 0, 3, 3), (2, 3, 0, 0)], ids=str)
def test_rowwise_operators(operator, dtype, shape, backend):
    assert_same(*rowwise_results(tensor_of, operator, dtype, shape, backend))


@pytest.mark.parametrize("operator", LINEAR)
def test_linear_operators(operator, dtype):
    assert_same(*linear_results(tensor_of, operator, dtype))


@given(data=st.data())
def test_any_shape_and_layout(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=5))
    x = (
        torch.arange(np.prod([2 * n for n in shape], dtype=int), dtype=torch.float32)
        .sin()
        .reshape([2 * n for n in shape])
    )
    x = x.to(data.draw(st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16))))
    for axis in range(len(shape)):
        x = x.narrow(axis, data.draw(st.integers(0, 1)) * shape[axis], shape[axis])
        if data.draw(st.booleans()):
            x = x[(slice(None),) * axis + (slice(None, None, 2),)]
    x = x.permute(data.draw(st.permutations(range(len(shape)))))
    if x.ndim and data.draw(st.booleans()):
        x = x.narrow(0, 0, min(1, x.shape[0])).expand(x.shape if x.shape[0] else (0, *x.shape[1:]))
    dim = data.draw(st.integers(-max(x.ndim, 1), max(x.ndim, 1) - 1))
    assert_same(ag.softmax_backward(x, x, dim), ag.softmax_backward(array_of(x), array_of(x), dim))


@pytest.mark.parametrize("value", [torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0)])
def test_numbers_and_nothing(value):
    result = ag.softmax(value)
    assert type(result) is torch.Tensor
    assert (result.shape, result.dtype) == (value.shape, value.dtype)


def test_results_may_be_used_as_any_tensor():
    x = torch.zeros(2, 4)
    result = ag.softmax(x)
    result += 1
    assert torch.equal(result, torch.full((2, 4), 1.25))
    result.requires_grad_()
    (2 * result).sum().backward()
    assert torch.equal(result.grad, torch.full((2, 4), 2.0))


def test_parameters_without_grad_and_other_plain_classes():
    class Noted(torch.Tensor):
        pass

    x = torch.zeros(2, 4)
    for value in (torch.nn.Parameter(x, requires_grad=False), torch.nn.Buffer(x), x.as_subclass(Noted), x.detach()):
        assert type(ag.softmax(value)) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_can_be_resized(dtype):
    """No call changes a property of its arguments, and torch can free and resize the memory of results."""
    x, weight, target, out = (
        torch.randn(4, 6).to(dtype),
        torch.randn(5, 6).to(dtype),
        torch.arange(4),
        torch.empty(4, 6),
    )
    found = ag.linear_cross_entropy(x, weight, target, outputs=("lse", "predicted"))
    with ag.use_backend("reference"):
        of_reference = ag.softmax(x)
    of_statistics = ag.fused_linear_online_max_sum(x, weight, target, 0, 5)
    results = ag.softmax(x), ag.softmax(x.float(), out=out), of_reference, *found[:3], *of_statistics[:5]
    for tensor in (x, weight, target, *results, found.lse, found.predicted):
        right = tensor.clone()
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        tensor.copy_(right)
        assert torch.equal(tensor, right)


def test_nothing_else_refers_to_a_result():
    assert sys.getrefcount(ag.softmax(torch.zeros(3))) == sys.getrefcount(torch.empty(3))


def test_results_of_any_size():
    for shape in ((), (0,), (3, 0), (1,), (9, 1 << 20)):  # the last one has huge pages
        x = torch.full(shape, 0.5)
        result = ag.softmax(x)
        torch.testing.assert_close(result, torch.softmax(x, -1))
        assert result.is_contiguous()
    with pytest.raises(MemoryError, match="cannot allocate a result of shape"):
        ag.softmax(torch.zeros(1).expand(1 << 28, 1 << 28))


def test_torch_does_not_observe_the_memory_of_results():
    """A mode or a tracer would make the allocation part of what it records or replaces."""
    x = torch.zeros(2, 4)
    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        result = ag.softmax(x)
    for each in (result, torch.func.grad(lambda y: (y * ag.softmax(x)).sum())(x)):
        assert torch.equal(each, torch.full((2, 4), 0.25))


def test_modes_of_torch():
    with torch.inference_mode():
        x = torch.zeros(4)
        assert torch.equal(ag.softmax(x, out=torch.empty(4)), torch.full((4,), 0.25))
    assert torch.equal(ag.softmax(x), torch.full((4,), 0.25))
    with torch.device("meta"):  # torch would make new tensors on this device
        assert ag.softmax(x).device.type == "cpu"


# ---- several libraries -----------------------------------------------------------------------------------------------


def test_numpy_does_not_mix():
    x = np.zeros((2, 3))
    error = outcome(ag.softmax_backward, torch.zeros(2, 3, dtype=torch.float64), x)
    assert type(error) is TYPE
    assert "output: expected an array of torch, like grad_output, got one of numpy" in str(error)
    error = outcome(ag.softmax_backward, x, torch.zeros(2, 3, dtype=torch.float64))
    assert "output: expected an array of numpy, like grad_output, got one of torch" in str(error)


@pytest.mark.parametrize("operator", [GRADIENT, STATISTICS, WHOLE])
def test_targets_and_masks_may_be_numpys(operator):
    problem = problem_of(operator, (9, 17, 5), "float32")
    arguments = problem.mapped(tensor_of).arguments
    for name in ("target", "masked_target", "target_mask"):
        if name in arguments:
            arguments[name] = problem.arguments[name]
    assert_same(getattr(ag, operator)(**arguments), getattr(ag, operator)(**problem.arguments))


# ---- out -------------------------------------------------------------------------------------------------------------


def test_out(operator, dtype, backend):
    problem = random_problem(operator, (2, 3, 4, 5), DTYPES[dtype])
    tensors = list(map(tensor_of, problem.arrays))
    function = getattr(ag, operator)
    out = torch.zeros(2, 3, 4, 10, dtype=tensors[0].dtype)[..., ::2]
    assert function(*tensors, **problem.settings, out=out, backend=backend) is out
    assert_same(out.contiguous(), function(*problem.arrays, **problem.settings, backend=backend))


def test_pairs_of_outs():
    problem = problem_of(LOSS, (9, 17, 5), "float32")
    out = torch.zeros(9), torch.zeros(9, 17)
    results = ag.fused_cross_entropy_loss_with_max_sum(**problem.mapped(tensor_of).arguments, out=out)
    assert all(result is each for result, each in zip(results, out, strict=True))
    assert_same(results, ag.fused_cross_entropy_loss_with_max_sum(**problem.arguments))


def test_autograd_notices_what_is_written():
    x = torch.ones(3, requires_grad=True)
    saved = torch.zeros(3)
    product = x * saved
    ag.softmax(torch.zeros(3), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    version = saved._version
    assert outcome(ag.softmax, torch.zeros(4), out=saved)
    ag.explain("softmax", torch.zeros(3), out=saved)
    assert saved._version == version


def test_outs_that_are_refused():
    x = torch.zeros(2, 3)
    for out, kind in (
        (torch.zeros(2, 3, requires_grad=True), TYPE),
        (torch.zeros(3, 2), INVALID),
        (torch.zeros(3).expand(2, 3), INVALID),
        (torch.zeros(2, 3, dtype=torch.int64), TYPE),
        (np.zeros((2, 3), np.float32), TYPE),
        (torch.zeros(2, 3, device="meta"), ag.BackendUnavailableError),
    ):
        error = outcome(ag.softmax, x, out=out)
        assert type(error) is kind
        assert "softmax: out: expected " in str(error)


# ---- refused arguments -----------------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[torch.Tensor, str]]:
    x = torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "grad": (x.clone().requires_grad_(), "got one that does; use ascend_grad.torch, or pass "),
            "parameter": (torch.nn.Parameter(x), "got one that does; use ascend_grad.torch, or pass "),
            "negative": (torch.complex(x, x).conj().imag, ".resolve_neg()"),
            "sparse": (x.to_sparse(), "got layout torch.sparse_coo"),
            "compressed": (x.to_sparse_csr(), "got layout torch.sparse_csr"),
            "opaque": (x.to_mkldnn(), "got layout torch._mkldnn"),
            "quantised": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "got dtype torch.qint8"),
            "nested": (torch.nested.nested_tensor([x, x[:2]]), "got a nested tensor"),
            "float8": (x.to(torch.float8_e4m3fn), "float64 or integers, got torch.float8_e4m3fn"),
            "complex": (x.to(torch.complex64), "got complex64"),
            "int": (x.to(torch.int64), "got int64"),
        }


@pytest.mark.parametrize("name", refused())
def test_tensors_that_are_refused(name):
    value, message = refused()[name]
    assert_refused_beside(value, torch.eye(3), message)


def test_other_devices():
    error = outcome(ag.softmax, torch.empty(3, device="meta"))
    assert type(error) is ag.BackendUnavailableError
    assert str(error).startswith("softmax: input: expected an array on the CPU, got one on device meta")


def test_classes_with_their_own_arithmetic():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    fake = FakeTensorMode().from_tensor(torch.zeros(3))
    for value in (fake, torch.zeros(3).as_subclass(Own)):
        error = outcome(ag.softmax, value)
        assert type(error) is TYPE
        assert "input: expected a tensor whose class does not override torch's functions, got " in str(error)


def test_tensors_within_transformations():
    """Tensors that a transformation wraps are refused, since they have no memory."""
    for transform, message in (
        (torch.vmap(ag.softmax), "a tensor with memory, got one .* that torch.vmap or torch.func transforms"),
        (torch.func.grad(lambda x: ag.softmax(x).sum()), "a tensor that does not require grad"),
    ):
        with pytest.raises(ag.ParamTypeError, match=message):
            transform(torch.zeros(3, 4))


def test_numbers_that_require_grad():
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    x = torch.zeros(1, 1, 2, 2)
    assert torch.equal(ag.scaled_masked_softmax(x, mask, torch.tensor(2.0)), torch.full((1, 1, 2, 2), 0.5))
    assert type(outcome(ag.scaled_masked_softmax, x, mask, torch.tensor(2.0, requires_grad=True))) is TYPE
    target = torch.tensor([0, 1])
    for reduction in ("mean", "none"):
        error = outcome(
            ag.linear_cross_entropy,
            torch.eye(2),
            torch.eye(2),
            target,
            reduction=reduction,
            grad_loss=torch.tensor(1.0, requires_grad=True),
        )
        assert type(error) is TYPE


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(1 + 0j), torch.tensor([1]), torch.ones(1, 1)])
def test_tensors_that_are_no_number(value):
    """Conversions of torch take elements of any shape, and truth values."""
    x, target = torch.zeros(2, 3), torch.tensor([0, 1])
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    for error in (
        outcome(ag.softmax, x, value),
        outcome(ag.softmax, x, num_threads=value),
        outcome(ag.linear_top_k, x, x, value),
        outcome(ag.cross_entropy, x, target, ignore_index=value),
        outcome(ag.cross_entropy, x, target, label_smoothing=value),
        outcome(ag.cross_entropy, x, target, denominator=value),
        outcome(ag.cross_entropy, x, target, grad_loss=value),
        outcome(ag.linear_top_k, x, x, 1, logit_scale=value),
        outcome(ag.scaled_masked_softmax, torch.zeros(1, 1, 2, 2), mask, value),
    ):
        assert type(error) is TYPE
        assert f", got {type(value).__name__} " in str(error)


# ---- lifetime of results ---------------------------------------------------------------------------------------------


def test_memory_is_shared_and_stays():
    result = ag.softmax(torch.zeros(2, 4))
    view = result.numpy()
    del result
    gc.collect()
    assert np.all(view == 0.25)
    x = torch.zeros(1000)
    tensors = [ag.softmax(x) for _ in range(8)]
    halves = [tensor[:500] for tensor in tensors]
    del tensors
    empty_on_threads(halves)


WITHOUT_API = """
    if "__dlpack_c_exchange_api__" in vars(torch.Tensor):
        del torch.Tensor.__dlpack_c_exchange_api__
"""

#: Code that removes the exchange functions that older versions of torch lack.
OLDER_EXCHANGES = {
    "methods": WITHOUT_API,
    "methods of before DLPack 1.0": f"""
    original = torch.Tensor.__dlpack__
    torch.Tensor.__dlpack__ = lambda self, stream=None: original(self, stream=stream)
    {WITHOUT_API}
    """,
}


@pytest.mark.parametrize("exchange", OLDER_EXCHANGES)
def test_without_the_exchange_api(exchange: str, run_script):
    """Calls work with older versions of torch, which have no exchange API.

    Capsules of older versions cannot say whether a tensor is writable.
    """
    script = f"""
    import torch
    {OLDER_EXCHANGES[exchange]}
    import ascend_grad as ag
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2, 4, dtype=dtype)
        out = torch.empty(2, 4, dtype=dtype)
        assert torch.equal(ag.softmax(x), torch.full_like(x, 0.25))
        version = out._version
        assert ag.softmax(x, out=out) is out
        assert torch.equal(out, torch.full_like(x, 0.25)) and out._version > version
    for refused in (x.clone().requires_grad_(), x.to_sparse(), torch.empty(2, device="meta")):
        try:
            ag.softmax(refused)
        except ag.AscendGradError as error:
            print(str(error).split(" [")[0])
    """
    told = run_script(script).stdout.splitlines()
    assert [line.split("got ")[1] for line in told] == [
        "one that does; use ascend_grad.torch, or pass input.detach()",
        "layout torch.sparse_coo; pass input.to_dense()",
        "one on device meta",
    ]
