"""Test programs that fork: children never hang, and compute with as many threads as their parent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from ascend_grad import _openmp

pytestmark = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

#: A large problem, and a function that runs another one in a child process, which must not hang.
SETUP = """
    import os, signal, threading, warnings
    import numpy as np
    import ascend_grad as ag
    from ascend_grad import _openmp
    warnings.simplefilter("ignore")  # of forking where there are threads
    x = np.linspace(0, 1, 2**21, dtype=np.float32).reshape(1024, 2048)

    def team():
        "Return the number of threads of a large call that asks for two."
        ag.softmax(x, num_threads=2)
        return _openmp.last_team_size()

    def in_child(function):
        "Return the number that the function returns in a child process."
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends itself
            os._exit(function())
        status = os.waitpid(child, 0)[1]
        assert os.WIFEXITED(status), f"the child was ended by signal {os.WTERMSIG(status)}"
        return os.WEXITSTATUS(status)
"""


def test_a_child_has_all_threads_after_an_import(run_script):
    run_script(f"""{SETUP}
    default = ag.get_num_threads()
    assert in_child(team) == 2
    assert in_child(ag.get_num_threads) == default
    """)


def test_a_child_has_all_threads_after_a_team(run_script):
    """The parent keeps its threads, too, and a child may fork further children."""
    run_script(f"""{SETUP}
    for _ in range(3):
        assert team() == 2
        assert in_child(team) == 2
        assert in_child(lambda: in_child(team)) == 2
        assert in_child(lambda: team() * 10 + in_child(team)) == 22
    assert in_child(ag.get_num_threads) == ag.get_num_threads()
    """)


def test_a_fork_from_another_thread(run_script):
    """Teams of the main thread and of the thread that forks do not disturb the child."""
    run_script(f"""{SETUP}
    assert team() == 2
    found = []

    def fork():
        found.append(in_child(team))
        found.append(team())
        found.append(in_child(team))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert found == [2, 2, 2], found
    assert team() == 2
    """)


def test_a_fork_while_another_thread_computes(run_script):
    run_script(f"""{SETUP}
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            team()

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert in_child(team) == 2
    finally:
        stop.set()
    """)


def test_threads_of_a_child_have_teams(run_script):
    run_script(f"""{SETUP}
    from concurrent.futures import ThreadPoolExecutor
    team()

    def in_threads():
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda _: team(), range(4)))

    assert in_child(in_threads) == 8
    """)


def test_a_fork_in_a_call_of_a_team(run_script):
    """A handler of a signal that forks within a call leaves the child one thread, as its team cannot be ended."""
    run_script(f"""{SETUP}
    found = []

    def handler(*_):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(team())
        found.append(os.waitpid(child, 0)[1])

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    large = np.zeros((4096, 8192), np.float32)
    while not found:
        ag.softmax_backward(large, large, num_threads=2)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert all(os.WIFEXITED(status) for status in found), found
    assert team() == 2
    """)


def test_a_fork_by_c(run_script):
    """Servers that are no Python programs fork without telling the interpreter."""
    run_script(f"""{SETUP}
    import ctypes
    team()
    libc = ctypes.PyDLL(None)
    child = libc.fork()
    if child == 0:
        libc.alarm(60)
        libc._exit(team())
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2, status
    """)


def test_bound_threads(run_script):
    script = f"""{SETUP}
    team()
    assert in_child(team) == 2
    assert team() == 2
    """
    run_script(script, OMP_PROC_BIND="true")


WORKERS = """
import multiprocessing
import sys
import numpy as np
import ascend_grad as ag
from ascend_grad import _openmp

def work(x):
    result = ag.softmax(x, num_threads=2)
    return result, _openmp.last_team_size(), ag.get_num_threads()

if __name__ == "__main__":
    x = np.linspace(0, 1, 2**20, dtype=np.float32).reshape(1024, 1024)
    method, first = sys.argv[1:]
    if first == "after a call":
        ag.softmax(x, num_threads=2)
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["__main__", "ascend_grad"])
    with context.Pool(2) as pool:
        for result, size, default in pool.map(work, [x] * 4):
            assert np.array_equal(result, ag.softmax(x))
            assert (size, default) == (2, ag.get_num_threads()), (size, default)
"""


@pytest.mark.parametrize("first", ["at once", "after a call"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_worker_processes(method, first, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WORKERS)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(program), method, first]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)


IMPORTED_BY_THE_CHILD = """
    import ctypes, os, signal
    import numpy as np
    {before}
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        import ascend_grad as ag
        from ascend_grad import _openmp
        from concurrent.futures import ThreadPoolExecutor

        def team():
            ag.softmax(np.zeros((1024, 2048), np.float32), num_threads=2)
            return _openmp.last_team_size()

        first = team()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(team).result() == 2
        os._exit(first)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == {threads}, status
"""


def test_an_import_after_a_fork(run_script):
    run_script(IMPORTED_BY_THE_CHILD.format(before="", threads=2))


def test_an_import_after_a_fork_and_openmp(run_script):
    """The main thread of such a child has no team, as OpenMP may have had one before the fork. Other threads have."""
    before = "openmp = ctypes.CDLL('libgomp.so.1'); openmp.GOMP_parallel(openmp.omp_get_wtime, None, 2, 0)"
    run_script(IMPORTED_BY_THE_CHILD.format(before=before, threads=1))


TORCH = """
    import torch
    a = torch.ones(1024, 2048)

    def torch_team():
        torch.set_num_threads(2)
        torch.softmax(a, 0)
"""

if importlib.util.find_spec("torch"):  # elsewhere there is no such test

    @pytest.mark.parametrize("order", ["torch first", "torch last"])
    def test_a_fork_after_a_team_of_torch(order, run_script):
        """PyTorch may share the OpenMP library, and so the team of a thread."""
        run_script(f"""{TORCH + SETUP if order == "torch first" else SETUP + TORCH}
    torch_team()
    assert in_child(team) == 2
    torch_team()
    team()
    assert in_child(lambda: in_child(team)) == 2
        """)
