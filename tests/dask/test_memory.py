"""Test computations on arrays that are larger than the memory of their worker, which may not spill to disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from dask.distributed import Client, KilledWorker

import ascend_grad.dask as agd

LIMIT = 350 << 20
ROWS, COLUMNS, BLOCK = 3 * 2**16, 2**10, 2**12  # the array has 768 MiB of float32, in blocks of 16 MiB


@pytest.fixture(scope="module")
def client(start_cluster) -> Iterator[Client]:
    """Start a client of a cluster with one worker, which is killed if it exceeds its memory limit."""
    memory = {"target": False, "spill": False, "pause": False, "terminate": 0.95, "monitor-interval": "10ms"}
    settings = {f"distributed.worker.memory.{name}": value for name, value in memory.items()}
    with (
        dask.config.set(settings | {"distributed.scheduler.allowed-failures": 0}),
        start_cluster(1, str(LIMIT)) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def rows(scale: float = 1.0) -> da.Array:
    """Make rows with equal numbers of the logits 0 and log(3) * `scale`."""
    row = np.tile(np.array([0, np.log(3) * scale], np.float32), COLUMNS // 2)
    return da.map_blocks(
        lambda block: np.repeat(block, BLOCK, axis=0),
        da.from_array(np.tile(row, (ROWS // BLOCK, 1)), chunks=(1, -1)),
        chunks=((BLOCK,) * (ROWS // BLOCK), (COLUMNS,)),
        dtype=np.float32,
    )


def test_row_by_row(client):
    logits = rows()
    assert logits.nbytes > 2 * LIMIT
    y = agd.softmax(logits)
    gradient = agd.softmax_backward(logits, y)
    # The probabilities are a quarter and three quarters of 2 / COLUMNS. The gradient is y * (g - sum(g * y)).
    half = COLUMNS // 2
    low, high = np.array([1, 3]) / 4 / half
    mean = 0.75 * np.log(3)
    expected = [-low * mean * half, high * (np.log(3) - mean) * half]
    sums = [gradient[:, i::2].sum(axis=1).max() for i in range(2)] + [y.sum(axis=1).min()]
    values = client.compute(sums, sync=True)
    np.testing.assert_allclose(values, [*expected, 1], rtol=1e-5)


def test_linear_cross_entropy(client):
    """The loss of an array that is larger than the memory limit is right.

    All classes are equally likely, since the weight is 0. Only the two targets have other gradients.
    """
    x, words = rows(), 5
    target = da.arange(ROWS, chunks=BLOCK) % 2
    loss, input_grad, weight_grad = agd.linear_cross_entropy(x, np.zeros((words, COLUMNS), np.float32), target)
    loss, largest, weight_grad = client.compute([loss, abs(input_grad).max(), weight_grad], sync=True)
    np.testing.assert_allclose(loss, np.log(words), rtol=1e-6)
    assert largest == 0
    logits = np.tile([0, np.log(3)], COLUMNS // 2)
    likely = np.full(words, 1 / words) - np.array([0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(weight_grad, np.outer(likely, logits), rtol=1e-5)


def test_the_worker_is_ended_beyond_its_limit(client):
    """A worker that holds its results exceeds the memory limit and is killed.

    The tests above would prove nothing if the limit did not work.
    """

    def hold(block):
        threading.Event().wait()

    y = agd.softmax(rows().rechunk((ROWS // 2, COLUMNS)))
    with pytest.raises(KilledWorker):
        client.compute(y.map_blocks(hold, dtype=y.dtype, meta=y._meta), sync=True)
