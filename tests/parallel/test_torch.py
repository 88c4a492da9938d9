"""Test ranks of torch.distributed that communicate by gloo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_checks import PROGRAM, check_all, outcomes
from processes import run_ranks
from samples import assert_identical
from thread_ranks import on_ranks, returned

import ascend_grad as ag
from ascend_grad import parallel


def in_processes(size: int, folder: Path, *more: str) -> list[int]:
    """Run processes and return the exit statuses. Only the time limit of pytest ends processes that do not finish."""
    arguments = ["-W", "error", PROGRAM, "gloo", folder]
    found = run_ranks([[*arguments, str(rank), str(size), *more] for rank in range(size)])
    statuses = [status for status, _ in found]
    assert more or statuses == [0] * size, "\n".join(output for _, output in found)
    return statuses


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks(default_engine, tmp_path, size):
    in_processes(size, tmp_path)
    check_all(default_engine, tmp_path, size)


def test_a_rank_that_is_killed(tmp_path):
    assert in_processes(2, tmp_path, "killed") == [0, -9]
    (tmp_path / "1.pickle").write_bytes((tmp_path / "0.pickle").read_bytes())
    error = outcomes(tmp_path, 2)[0]["killed"]
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, ag.AscendGradError)


def test_tensors():
    """Results of tensors are tensors, of the bits that arrays have."""
    random = np.random.default_rng(0)
    x, w, target = random.standard_normal((7, 4)), random.standard_normal((12, 4)), random.integers(0, 12, 7)
    options = {"bias": random.standard_normal(12), "deterministic": True}
    lse = ag.linear_cross_entropy(x, w, target, bias=options["bias"], return_grad=False, outputs=("lse",)).lse

    def calls(comm, to):
        own = slice(5 * comm.rank, 5 + 7 * comm.rank)
        given = to(x), to(w[own])
        more = options | {"bias": to(options["bias"][own])}
        yield parallel.linear_cross_entropy(*given, to(target), comm=comm, outputs=("entropy", "correct"), **more)
        yield parallel.linear_cross_entropy_backward(*given, to(target), comm=comm, lse=to(lse), grad_loss=1.0, **more)
        yield parallel.linear_top_k(*given, 3, comm=comm, bias=more["bias"])

    arrays, tensors = (
        returned(on_ranks(2, lambda comm, to=to: list(calls(comm, to)))) for to in (np.asarray, torch.from_numpy)
    )
    for of_rank, right in zip(tensors, arrays):
        for result, expected in zip(of_rank, right):
            assert result._fields == expected._fields
            for value, array in zip(result, expected):
                assert isinstance(value, torch.Tensor)
                assert_identical(value.numpy(), np.asarray(array))


def test_a_group_of_others():
    x, w, t = np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(2, np.int64)
    with pytest.raises(ag.ParamTypeError, match="comm: expected a process group that this process is in"):
        parallel.linear_cross_entropy(x, w, t, comm=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_group_without_tensors_of_the_cpu(tmp_path):
    dist.init_process_group("cuda:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        x, w, t = np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(2, np.int64)
        assert group is not None
        with pytest.raises(ag.ParamTypeError, match="comm: expected a process group for tensors on the CPU"):
            parallel.linear_cross_entropy(x, w, t, comm=group)
    finally:
        dist.destroy_process_group()
