"""The processes of a group on Ascend NPUs: ``python hccl_fork.py FOLDER HOME BACKEND WHAT``, as `hccl_ranks` says.

Imports torch, and torch_npu where it is installed, and then forks into the ranks, so that an import is paid once. The
runtime is not initialised before the fork: a child could not use it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch_npu_real

RANKS = 2


def fork() -> int:
    """Return the rank in each of the children. Wait for them in this process, and end it as they have ended."""
    children = []
    for rank in range(RANKS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python, about threads: these have nothing to do
            child = os.fork()
        if child == 0:
            return rank
        children.append(child)
    os._exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


def main(folder: str, home: str, backend: str, what: str) -> None:
    if torch_npu_real.IS_INSTALLED:
        torch_npu_real.load(Path(home))
    else:
        import torch  # noqa: F401
    rank = fork()
    os.environ["ASCEND_GRAD_DEVICE"] = str(rank)  # which is read when ascend_grad is imported
    import hccl_ranks

    hccl_ranks.run(folder, home, backend, what, rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
