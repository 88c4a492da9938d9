"""Test programs that the system refuses further threads: calls compute on one thread, and the process never ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from ascend_grad import _openmp

pytestmark = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

SETUP = """
    import os, resource
    import numpy as np
    import ascend_grad as ag
    from ascend_grad import _openmp, _threads
    _threads.detect_oversubscription(False)
    x = np.linspace(0, 1, 2**21, dtype=np.float32).reshape(1024, 2048)
    target = np.zeros(512, np.int64)

    def threads():
        ag.softmax(x, num_threads=2)
        size = _openmp.last_team_size()
        ag.linear_cross_entropy(x[:512], x[512:], target, num_threads=2)
        assert _openmp.last_team_size() == size
        ag.softmax(x, num_threads=3 * size)
        assert (_openmp.last_team_size() == 1) == (size == 1)
        return size

    def refuse():
        "Let the system refuse further threads, which it does not to the superuser."
        if os.geteuid() == 0:
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

    def allow():
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
"""


def test_a_limit_of_processes(run_script):
    run_script(f"""{SETUP}
    expected = ag.softmax(x, num_threads=1)
    refuse()
    assert threads() == 1
    assert np.array_equal(ag.softmax(x, num_threads=2), expected)
    assert ag.explain("softmax", x, num_threads=2).threads == 1
    """)


def test_threads_that_were_refused_for_a_while(run_script):
    run_script(f"""{SETUP}
    import time
    refuse()
    assert threads() == 1
    allow()
    end = time.monotonic() + 60
    while _openmp.last_team_size() == 1:
        assert time.monotonic() < end
        time.sleep(0.1)
        ag.softmax(x, num_threads=2)
    """)


def test_a_team_that_exists_is_kept(run_script):
    """Threads that a team has already are no new ones. A larger team would need more."""
    run_script(f"""{SETUP}
    ag.softmax(x, num_threads=2)
    refuse()
    ag.softmax(x, num_threads=2)
    assert _openmp.last_team_size() == 2
    ag.softmax(x, num_threads=4)
    assert _openmp.last_team_size() == 1
    ag.softmax(x, num_threads=2)
    assert _openmp.last_team_size() == 2
    """)


def test_threads_without_memory_for_their_stacks(run_script):
    script = f"""{SETUP}
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, -1))
    assert threads() == 1
    """
    run_script(script, OMP_STACKSIZE="1G")
    run_script(script, OMP_STACKSIZE=" 1048576 ")
    run_script(script, GOMP_STACKSIZE="1024 m")
    run_script(script, OMP_STACKSIZE="large", GOMP_STACKSIZE="1G")


def test_a_smaller_team_in_between(run_script):
    """It ends the other threads, which a later team needs again."""
    run_script(f"""{SETUP}
    from ascend_grad._rowwise_python import stream_add
    a = x[0]
    ag.softmax(x, num_threads=4)
    stream_add(a, a, a.copy(), False, 2)
    refuse()
    ag.softmax(x, num_threads=4)
    assert _openmp.last_team_size() == 1
    """)


def test_teams_that_openmp_limits(run_script):
    """The threads that OpenMP does not give are not tried again in each call."""
    script = f"""{SETUP}
    ag.softmax(x, num_threads=8)
    size = _openmp.last_team_size()
    assert size <= 2
    refuse()
    ag.softmax(x, num_threads=8)
    assert _openmp.last_team_size() == size
    """
    run_script(script, OMP_THREAD_LIMIT="2")
    run_script(script, OMP_THREAD_LIMIT="1")


@pytest.mark.parametrize("limit", [1, 2])
def test_numbers_of_threads_that_openmp_limits(run_script, limit: int):
    """The number of threads is at most OpenMP's limit, whoever asks for more."""
    run_script(
        f"""{SETUP}
    assert ag.explain("softmax", x, num_threads=8).threads == {limit}
    assert ag.explain("softmax", x).threads <= {limit}
    assert ag.get_num_threads() <= {limit}
    ag.set_num_threads(8)
    assert ag.explain("softmax", x).threads == {limit}
    assert ag.get_num_threads() == {limit}
    ag.softmax(x, num_threads=8)
    assert _openmp.last_team_size() == {limit}
    """,
        OMP_THREAD_LIMIT=str(limit),
    )


def test_a_child_and_another_thread(run_script):
    run_script(f"""{SETUP}
    from concurrent.futures import ThreadPoolExecutor
    ag.softmax(x, num_threads=2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        refuse()
        assert pool.submit(threads).result() == 1  # it has a team of its own, or none
    """)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs the superuser, and setpriv")
def test_an_import_where_no_thread_can_be_created():
    """Another user, who may read all files, may have one process. OpenBLAS would complain of it, but has one thread."""
    program = """
import numpy as np, ascend_grad as ag
x = np.ones((1024, 2048), np.float32)
print(ag.softmax(x).sum(), ag.softmax(x, num_threads=2).sum(), ag.linear_cross_entropy(x, x, [0] * 1024).loss)
"""
    capability = "-all,+dac_read_search"
    user = ["setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={capability}", f"--ambient-caps={capability}"]
    command = [*user, "prlimit", "--nproc=1", sys.executable, "-P", "-c", program]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
