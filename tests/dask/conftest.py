"""Define a fixture for all schedulers of dask: one thread, several threads, processes, and a small cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import dask
import pytest
from dask.distributed import Client, LocalCluster

SCHEDULERS = ("synchronous", "threads", "processes", "distributed")


@pytest.fixture(scope="session")
def _processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="session")
def start_cluster() -> Iterator[Callable[..., Any]]:
    """Return a function that starts worker processes with the given memory. Timeouts are long, for a busy machine."""

    def start(workers: int, memory_limit: str) -> LocalCluster:
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory_limit,
            dashboard_address=":0",  # any free port, as several test processes may have a cluster
        )

    patience = dict.fromkeys(("distributed.comm.timeouts.connect", "distributed.comm.timeouts.tcp"), "10m")
    with dask.config.set(patience):
        yield start


@pytest.fixture(scope="session")
def _client(start_cluster) -> Iterator[Client]:
    with start_cluster(2, "1GiB") as cluster, Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(params=SCHEDULERS)
def compute(request: pytest.FixtureRequest) -> Callable[..., tuple]:
    """Return a function that computes arrays with one of the schedulers."""
    if request.param == "distributed":
        client = request.getfixturevalue("_client")
        return lambda *arrays: tuple(client.compute(arrays, sync=True))
    pool = {"pool": request.getfixturevalue("_processes")} if request.param == "processes" else {}
    return lambda *arrays: dask.compute(*arrays, scheduler=request.param, **pool)
