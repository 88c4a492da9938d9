"""Test torch's tools on the functions for tensors: counting of operations, tracing, and kinds of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ascend_grad as ag
import ascend_grad.torch as agt

X, W, TARGET = torch.randn(4, 6), torch.randn(5, 6), torch.tensor([0, 4, 2, 1])
PRODUCT = 2 * 4 * 5 * 6


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_flops_of_the_loss(reduction: str, frozen: bool, products: int):
    """One product computes the logits, and one each gradient. One loss per row computes the logits twice."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_(not frozen)
    found = counted(lambda: agt.linear_cross_entropy(x, w, TARGET, reduction=reduction).sum().backward())
    assert found == (products + (reduction == "none")) * PRODUCT


def test_flops_of_further_operators():
    outputs = agt.linear_cross_entropy(X.clone().requires_grad_(), W, TARGET, outputs=("lse",))
    assert counted(lambda: outputs.lse.sum().backward()) == 2 * PRODUCT
    statistics = agt.fused_linear_online_max_sum(X, W, TARGET, 0, 5)
    assert counted(lambda: agt.fused_linear_online_max_sum(X, W, TARGET, 0, 5)) == PRODUCT
    maximum, total, _, mask, masked, _ = statistics
    arguments = torch.ones(4), X, W, mask, masked, 0.0, maximum, total
    assert counted(lambda: agt.fused_linear_cross_entropy_loss_grad(*arguments)) == 3 * PRODUCT
    assert counted(lambda: agt.softmax(X)) == counted(lambda: torch.softmax(X, -1)) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_jit_trace():
    traced = torch.jit.trace(lambda x: agt.softmax(x), X, check_trace=False)
    assert torch.equal(traced(W), agt.softmax(W))
    for name, loss in (
        ("linear_cross_entropy", lambda x: agt.linear_cross_entropy(x, W, TARGET)),
        ("cross_entropy", lambda x: agt.cross_entropy(x, TARGET)),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}: torch.jit.trace is not supported"):
            torch.jit.trace(loss, X)


DOORS = {
    "agt.softmax": agt.softmax,
    "agt.linear_cross_entropy": lambda x: agt.linear_cross_entropy(x, W, TARGET),
    "agt.cross_entropy": lambda x: agt.cross_entropy(x, TARGET),
    "compat.cce": lambda x: agt.compat.cce.linear_cross_entropy(x, W, TARGET),
    "compat.liger": lambda x: agt.compat.liger.liger_fused_linear_cross_entropy(x, W, TARGET),
    "compat.verl": lambda x: agt.compat.verl.linear_cross_entropy(x, W, TARGET),
    "ag.softmax": ag.softmax,
    "ag.linear_cross_entropy": lambda x: ag.linear_cross_entropy(x, W, TARGET),
}


@pytest.mark.parametrize("door", DOORS)
def test_tensors_of_several_processes(door: str, tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.tensor import DTensor, init_device_mesh

        x = DTensor.from_local(X, init_device_mesh("cpu", (1,)))
        with pytest.raises(ag.ParamTypeError, match=r"DTensor; pass \w+.to_local\(\) or \w+.full_tensor\(\)"):
            DOORS[door](x)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("door", DOORS)
def test_sparse_tensors(door: str):
    with pytest.raises(ag.ParamTypeError, match=r"expected a dense tensor, got .*; pass \w+.to_dense\(\)"):
        DOORS[door](X.to_sparse())


def test_sparse_matrices():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(ag.ParamTypeError, match="input: expected"):
        ag.softmax(sparse.csr_matrix(np.eye(3)))
