"""Test programs whose threads are bound to cores: by OpenMP, by the user, or by a pool of threads."""

from __future__ import annotations

import os

import pytest

from ascend_grad import _openmp

pytestmark = [
    pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

SETUP = """
    import os, threading
    import numpy as np
    import ascend_grad as ag
    from ascend_grad import _openmp, _threads
    _threads.detect_oversubscription(False)
    x = np.linspace(0, 1, 2**22, dtype=np.float32).reshape(1024, 4096)
    hidden, weight = x.reshape(-1, 512)[:2048], x.reshape(-1, 512)[2048:6144]
    target = np.zeros(len(hidden), np.int64)

    def threads():
        for _ in range(3):
            ag.softmax(x)
        return _openmp.last_team_size()
"""

BINDINGS = [
    {"OMP_PROC_BIND": "true"},
    {"OMP_PROC_BIND": "spread", "OMP_PLACES": "threads"},
    {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
    {"OMP_PLACES": "threads"},
    {"GOMP_CPU_AFFINITY": ",".join(map(str, sorted(os.sched_getaffinity(0))))},
]


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: " ".join(map("=".join, binding.items())))
def test_threads_that_openmp_has_bound(binding, run_script):
    """OpenMP binds the calling thread to one core. The process still has all of them, in any thread."""
    run_script(
        f"""
    import os
    cores = len(os.sched_getaffinity(0)){SETUP}
    assert ag.get_num_threads() == cores, ag.get_num_threads()
    assert threads() == cores
    found = []
    thread = threading.Thread(target=lambda: found.append(threads()))
    thread.start()
    thread.join()
    assert found == [cores], found
        """,
        **binding,
    )


@pytest.mark.parametrize("name", ["OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_places_of_fewer_cores(name, run_script):
    """OpenMP's threads share the cores of its places."""
    core = str(min(os.sched_getaffinity(0)))
    value = f"{{{core}}}" if name == "OMP_PLACES" else core
    run_script(f"""{SETUP}
    assert ag.get_num_threads() == threads() == 1
    """, **{name: value})  # fmt: skip


def test_all_bound_threads_of_a_linear_call_compute(run_script):
    """The threads of a team compute, not only the calling one."""
    run_script(
        f"""{SETUP}
    import time
    own, all_threads = 0, 0
    for _ in range(20):
        begin = time.thread_time(), time.process_time()
        ag.linear_cross_entropy(hidden, weight, target, num_threads=2)
        own += time.thread_time() - begin[0]
        all_threads += time.process_time() - begin[1]
    assert all_threads > 1.02 * own, (own, all_threads)
        """,
        OMP_PROC_BIND="true",
    )


def test_taskset_and_a_later_binding_by_openmp(run_script):
    """OpenMP binds within the cores that a process was started with, and knows how many these are."""
    script = f"""
    import os
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}){SETUP}
    assert ag.get_num_threads() == threads() == 1
    """
    run_script(script)
    run_script(script, OMP_PROC_BIND="true")


def test_cores_that_the_user_takes_away(run_script):
    """The affinity of the calling thread limits its calls at once: the threads that it starts inherit it."""
    run_script(f"""{SETUP}
    cores = sorted(os.sched_getaffinity(0))
    assert threads() == ag.get_num_threads() == len(cores)
    os.sched_setaffinity(0, cores[:1])
    assert threads() == ag.get_num_threads() == 1
    os.sched_setaffinity(0, cores)
    assert threads() == ag.get_num_threads() == len(cores)
    """)


def test_a_pool_whose_threads_have_a_core_each(run_script):
    """Threads with one core take one thread each, while the main thread still has all cores."""
    run_script(f"""{SETUP}
    from concurrent.futures import ThreadPoolExecutor
    cores = sorted(os.sched_getaffinity(0))
    left = iter(cores[:2])
    both = threading.Barrier(2)

    def work(_):
        both.wait(60)
        return ag.get_num_threads()

    with ThreadPoolExecutor(2, initializer=lambda: os.sched_setaffinity(0, {{next(left)}})) as pool:
        assert list(pool.map(work, range(2))) == [1, 1]
        assert pool.submit(threads).result() == 1
    assert threads() == ag.get_num_threads() == len(cores)
    """)
