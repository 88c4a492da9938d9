"""Measure the losses over ranks and print the tables: ``python -m ascend_grad.bench.parallel``.

This needs mpi4py and an MPI library (extra ``mpi``), and an otherwise idle machine.
"""

from __future__ import annotations

import argparse

from ..documents import FOLDER, PARALLEL
from .measure import measure
from .report import measured_block, model_block, network_text

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ascend_grad.bench.parallel", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help=f"write {PARALLEL}")
    arguments = parser.parse_args()
    results = measure(arguments.processes)
    print(measured_block(results), network_text(results), model_block(results), sep="\n")
    if arguments.keep:
        (FOLDER / PARALLEL).write_text(results.to_json(), encoding="utf-8")
