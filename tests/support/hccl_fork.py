"""Start the processes of a group on Ascend NPUs: ``python hccl_fork.py FOLDER HOME BACKEND WHAT``.

`hccl_ranks` describes the arguments. torch, and torch_npu if it is installed, are imported once, before the process
forks into the ranks. The runtime is initialised after the fork, since a child could not use a runtime that its parent
has initialised.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch_npu_real

RANKS = 2


def fork() -> int:
    """Return the rank in each child. The parent waits for the children, and exits with their status."""
    children = []
    for rank in range(RANKS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of the threads, which are idle here
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
    os.environ["ASCEND_GRAD_DEVICE"] = str(rank)  # ascend_grad reads the variable when it is imported
    import hccl_ranks

    hccl_ranks.run(folder, home, backend, what, rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
