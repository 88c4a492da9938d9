"""Run a program that splits the classes over processes as users of cut-cross-entropy do."""

from __future__ import annotations

from pathlib import Path

from processes import run_ranks

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from ascend_grad.torch.compat.cce import LinearCrossEntropyImpl, VocabParallelOptions, linear_cross_entropy

rank, size = int(sys.argv[2]), 2
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=size)
torch.manual_seed(0)
e, c, targets = torch.randn(6, 4), torch.randn(11, 4), torch.randint(0, 11, (6,))
right = torch.nn.functional.cross_entropy(e @ c.T, targets)

options = VocabParallelOptions.from_vocab(11)
assert (options.start, options.stop) == [(0, 6), (6, 11)][rank]
assert options.group is None and options.reduce_e_grad
part = c[options.start : options.stop].clone().requires_grad_()
loss = linear_cross_entropy(
    e, part, targets, vocab_parallel_options=options, impl=LinearCrossEntropyImpl.CCE_EXACT, filter_eps=0.5
)
torch.testing.assert_close(loss, right)
loss.backward()
whole = c.clone().requires_grad_()
torch.nn.functional.cross_entropy(e @ whole.T, targets).backward()
torch.testing.assert_close(part.grad, whole.grad[options.start : options.stop])

alone = dist.new_group([0])
if rank == 0:
    options = VocabParallelOptions.from_vocab(11, alone)
    assert (options.start, options.stop, options.group) == (0, 11, alone)
else:
    try:
        VocabParallelOptions.from_vocab(11, alone)
    except ValueError as error:
        assert "group: expected a group that this process is in" in str(error), error
    else:
        raise AssertionError("a process is not in the group")
dist.destroy_process_group()
"""


def test_a_program_with_two_processes(tmp_path: Path):
    for status, output in run_ranks([["-P", "-c", PROGRAM, tmp_path, str(rank)] for rank in range(2)]):
        assert status == 0, output
