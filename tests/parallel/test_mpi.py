"""Test ranks under mpiexec, by mpi4py and an MPI library."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import losses_over_ranks
import numpy as np
import pytest
from engine_checks import PROGRAM, check_all
from mpi4py import MPI

import ascend_grad as ag
from ascend_grad import parallel

#: Path of mpiexec in the Python environment, or else the name of an mpiexec in PATH.
MPIEXEC = next(map(str, Path(sys.executable).parent.glob("mpiexec")), "mpiexec")


def mpiexec(size: int, *arguments: str | Path) -> subprocess.CompletedProcess:
    """Run ranks under mpiexec. Only the time limit of pytest ends ranks that do not finish."""
    command = [MPIEXEC, "-n", str(size), sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(default_engine, tmp_path, size):
    done = mpiexec(size, PROGRAM, "mpi", tmp_path)
    assert done.returncode == 0, done.stderr
    check_all(default_engine, tmp_path, size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed(tmp_path, size):
    """No rank waits for a killed rank.

    Either mpiexec ends the other ranks, or the other ranks end with an error of MPI.
    """
    done = mpiexec(size, PROGRAM, "mpi", tmp_path, "killed")
    assert done.returncode != 0
    for left in tmp_path.glob("*.pickle"):
        assert isinstance(pickle.loads(left.read_bytes())["killed"], MPI.Exception)


@pytest.mark.parametrize("comm", [MPI.COMM_NULL, MPI.Intercomm(MPI.COMM_NULL)])
def test_no_communicator(comm):
    x, w, t = np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(2, np.int64)
    with pytest.raises(ag.ParamTypeError, match=r"comm: expected an intracommunicator, got MPI\.COMM_NULL"):
        parallel.linear_cross_entropy(x, w, t, comm=comm)


def test_one_process(default_engine):
    x, w, t = np.eye(3), np.ones((4, 3)), np.array([0, 1, 3])
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        result = parallel.linear_cross_entropy(x, w, t, comm=comm)
        for one, other in zip(result, ag.linear_cross_entropy(x, w, t)):
            np.testing.assert_allclose(one, other, rtol=1e-14)


def test_the_example():
    done = mpiexec(2, losses_over_ranks.__file__, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
