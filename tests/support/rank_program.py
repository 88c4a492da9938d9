"""Run all cases on each rank of a real engine, and write their outcomes to a file.

The program is started by ``python rank_program.py mpi FOLDER`` under mpiexec, or by ``python rank_program.py gloo
FOLDER RANK SIZE``. With one more argument it runs only the case "killed".
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from parallel_samples import even_cuts, tokens_rank, vocabulary_rank, whole
from samples import DTYPES

from ascend_grad import parallel
from ascend_grad.parallel import chunking, part_backend

SHARES = (True, False, "scatter")


class Engine:
    """Connect a group of processes by a communicator of all of them, and by communicators of parts."""

    comm: Any
    rank: int
    size: int
    #: The class of the engine's own exceptions.
    error: type[Exception]
    #: A function that returns the group, to which no reference may remain in the end.
    group: Callable[[], Any] = staticmethod(lambda: None)

    def split(self, members: list[list[int]]) -> Any:
        """Return the communicator of the part that this rank is in."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group, since threads of gloo may abort a process that ends while the group is alive."""


class Mpi(Engine):
    def __init__(self, *_: str):
        from mpi4py import MPI

        self.comm, self.error = MPI.COMM_WORLD, MPI.Exception
        self.rank, self.size = self.comm.rank, self.comm.size

    def split(self, members):
        return self.comm.Split(next(i for i, part in enumerate(members) if self.rank in part))


class Gloo(Engine):
    def __init__(self, folder: str, rank: str, size: str):
        import torch.distributed as dist

        self.rank, self.size = int(rank), int(size)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=self.rank, world_size=self.size)
        self.comm, self.error = dist.group.WORLD, RuntimeError
        self.group = weakref.ref(self.comm)

    def split(self, members):
        import torch.distributed as dist

        return next(group for group, part in [(dist.new_group(part), part) for part in members] if self.rank in part)

    def close(self):
        import torch.distributed as dist

        dist.destroy_process_group()


# ---- cases: their names, and what a rank does ------------------------------------------------------------------------


def uneven_cuts(count: int, size: int) -> list[int]:
    return [0, *sorted(count * (rank**2) // size**2 for rank in range(1, size)), count]


def vocabulary_cases(size: int) -> dict[str, tuple]:
    """Return problem, cuts and options of each case, by name."""
    cases: dict[str, tuple] = {}
    for dtype in DTYPES:
        for share in SHARES:
            for deterministic in (False, True):
                options = {"reduce_input_grad": share, "deterministic": deterministic}
                problem = whole((33, 50, 17), dtype, reduction="none" if share == "scatter" else "mean")
                cases[f"{dtype} {share} {deterministic}"] = problem, uneven_cuts(50, size), options
    float32 = partial(whole, dtype="float32")
    cases["one token"] = float32((1, 12, 5)), even_cuts(12, size), {}
    cases["fewer entries than ranks"] = float32((7, size - 1, 5)), even_cuts(size - 1, size), {}
    cases["fewer entries than ranks, scattered"] = (
        float32((1, size - 1, 5)), even_cuts(size - 1, size), {"reduce_input_grad": "scatter", "deterministic": True}
    )  # fmt: skip
    everywhere = float32((9, 12, 5))
    cases["all ignored"] = everywhere.replaced(target=np.full(9, -7)), even_cuts(12, size), {}
    cases["no target in some shards"] = everywhere.replaced(target=np.zeros(9, np.int64)), even_cuts(12, size), {}
    cases["no token"] = float32((0, 12, 5)), even_cuts(12, size), {"reduce_input_grad": "scatter"}
    cases["row chunks"] = float32((4 * chunking.CHUNK_ROWS, 40, 8)), even_cuts(40, size), {}
    return cases


def token_cases(size: int) -> dict[str, tuple]:
    cases: dict[str, tuple] = {}
    for dtype in DTYPES:
        for share in (True, "scatter"):
            for deterministic in (False, True):
                options = {"reduce_weight_grad": share, "deterministic": deterministic}
                cases[f"{dtype} {share} {deterministic}"] = whole((50, 33, 17), dtype), uneven_cuts(50, size), options
    cases["none"] = whole((9, 20, 4), "float32", reduction="none"), even_cuts(9, size), {}
    cases["fewer tokens than ranks"] = whole((size - 1, 5, 4), "float32"), even_cuts(size - 1, size), {}
    return cases


#: A problem, the cuts of its vocabulary and the cuts of its tokens, for a grid of 2 x 2.
GRID = whole((25, 33, 9), "bfloat16"), [0, 20, 33], [0, 10, 25]


def grid_ranks(engine: Engine) -> tuple[Any, Any]:
    """Return vocab_comm and comm: rank 2 t + v has the vocabulary part v and the token part t."""
    return engine.split([[0, 1], [2, 3]]), engine.split([[0, 2], [1, 3]])


def grid_case(engine: Engine) -> Any:
    problem, entries, rows = GRID
    vocab_comm, comm = grid_ranks(engine)
    return tokens_rank(
        problem, rows, comm, slice(entries[engine.rank % 2], entries[engine.rank % 2 + 1]), vocab_comm=vocab_comm
    )


def failures(engine: Engine) -> dict[str, Callable[[], Any]]:
    """Return calls in which one rank alone raises or disagrees, and a good call after them."""
    problem = whole((9, 20, 4), "float32")
    cuts, is_last = even_cuts(20, engine.size), engine.rank == engine.size - 1

    def rank_of_vocabulary(**options: Any) -> Any:
        return vocabulary_rank(problem, cuts, engine.comm, **(options if is_last else {}))

    def in_a_step(error: BaseException) -> Any:
        original = part_backend._linear_python.part_gradients

        def operator(*_: Any, **__: Any) -> Any:
            raise error

        if is_last:
            part_backend._linear_python.part_gradients = operator
        try:
            return rank_of_vocabulary()
        finally:
            part_backend._linear_python.part_gradients = original

    return {
        "bad argument": partial(rank_of_vocabulary, filter_eps=-1.0),
        "no memory": partial(in_a_step, MemoryError("no room")),
        "Ctrl-C": partial(in_a_step, KeyboardInterrupt()),
        "wrong shard": partial(
            vocabulary_rank, problem, [*cuts[:-1], 19] if is_last else cuts, engine.comm, vocab_size=20
        ),
        "disagreement": partial(rank_of_vocabulary, reduction="sum"),
        "afterwards": rank_of_vocabulary,
    }


def outcome(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or its exception without the traceback, which keeps the process group alive."""
    try:
        return work()
    except BaseException as error:
        return pickle.loads(pickle.dumps(error))


def killed(engine: Engine) -> Any:
    """Make calls in which the last rank dies."""
    problem = whole((9, 20, 4), "float32")
    if engine.rank == engine.size - 1:
        part_backend.HostBackend.statistics = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return vocabulary_rank(problem, even_cuts(20, engine.size), engine.comm)


def main(kind: str, folder: str, *more: str) -> Callable[[], Any]:
    """Run the cases and return the group, which nothing may keep alive."""
    numbers, only = (more[:2], more[2:]) if kind == "gloo" else ((), more)
    engine = {"mpi": Mpi, "gloo": Gloo}[kind](folder, *numbers)
    outcomes: dict[str, Any] = {}
    if only:
        outcomes["killed"] = outcome(partial(killed, engine))
    else:
        for name, (problem, cuts, options) in vocabulary_cases(engine.size).items():
            outcomes[f"vocabulary {name}"] = [
                outcome(partial(vocabulary_rank, problem, cuts, engine.comm, **options)) for _ in range(2)
            ]
        for name, (problem, cuts, options) in token_cases(engine.size).items():
            outcomes[f"tokens {name}"] = [
                outcome(partial(tokens_rank, problem, cuts, engine.comm, **options)) for _ in range(2)
            ]
        if engine.size == 4:
            outcomes["grid"] = outcome(partial(grid_case, engine))
        for name, work in failures(engine).items():
            outcomes[f"failure {name}"] = outcome(work)
        outcomes["ranges"] = [parallel.vocab_range(10, engine.rank, engine.size)]
    Path(folder, f"{engine.rank}.pickle").write_bytes(pickle.dumps(outcomes))
    if only:
        os._exit(0)  # the engine cannot finish without the killed process
    engine.close()
    return engine.group


if __name__ == "__main__":
    group = main(*sys.argv[1:])
    gc.collect()
    assert group() is None  # gloo's threads sometimes abort a process that ends while the group is alive
