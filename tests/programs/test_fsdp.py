"""Train a language model with FSDP2 on two ranks, with mixed precision and recomputed activations.

FSDP frees and allocates the memory of parameters by `Storage.resize_`. The losses must leave that possible.
"""

from __future__ import annotations

from pathlib import Path

import torch
from processes import run_ranks

import ascend_grad.torch as agt

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ascend_grad.torch as agt

folder, rank = sys.argv[1], int(sys.argv[2])
VOCABULARY, FEATURES, ROWS = 50, 16, 12


def materialised(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target)


def of_logits(hidden, weight, target):
    return agt.cross_entropy(hidden @ weight.T, target)


def per_row(hidden, weight, target):
    return agt.linear_cross_entropy(hidden, weight, target, reduction="none").mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(3 * FEATURES, FEATURES)

    def forward(self, x):
        return x + self.second(agt.softmax(self.first(x)))


class Model(nn.Module):
    def __init__(self, loss, reentrant):
        super().__init__()
        self.loss, self.reentrant = loss, reentrant
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def recomputed(self, function, *arguments):
        if self.reentrant is None:
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=self.reentrant)

    def forward(self, ids, target):
        h = self.embedding(ids)
        for block in self.blocks:
            h = self.recomputed(block, h)
        return self.recomputed(self.loss, h, self.head.weight, target)


def losses_of_steps(loss, dtype, reentrant):
    torch.manual_seed(0)
    model = Model(loss, reentrant)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    torch.manual_seed(1 + rank)
    ids, target = torch.randint(VOCABULARY, (ROWS,)), torch.randint(VOCABULARY, (ROWS,))
    found = []
    for _ in range(3):
        value = model(ids, target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return torch.tensor(found)


dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
    right = losses_of_steps(materialised, dtype, None)
    assert right[-1] < right[0] - 0.1
    for loss, reentrant in (
        (agt.linear_cross_entropy, None), (agt.linear_cross_entropy, True), (per_row, False), (of_logits, False)
    ):
        found = losses_of_steps(loss, dtype, reentrant)
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
dist.destroy_process_group()
print("done")
"""


def test_two_ranks(tmp_path: Path):
    for status, output in run_ranks([["-P", "-c", PROGRAM, tmp_path, str(rank)] for rank in range(2)]):
        assert status == 0, output
        assert output.endswith("done\n")


def test_memory_of_results_is_freed():
    """A program may free the memory of an activation and allocate it again, whichever function computed it."""
    x, target = torch.randn(6, 8), torch.arange(6)
    hidden = torch.randn(6, 8, requires_grad=True)
    loss = agt.linear_cross_entropy(hidden, torch.randn(7, 8), target, reduction="none")
    loss.sum().backward()
    for result in (agt.softmax(x), agt.cross_entropy(x, target, reduction="none"), loss, hidden.grad):
        right = result.detach().clone()
        size = result.untyped_storage().nbytes()
        result.untyped_storage().resize_(0)
        result.untyped_storage().resize_(size)
        result.detach().copy_(right)
        assert torch.equal(result, right)
