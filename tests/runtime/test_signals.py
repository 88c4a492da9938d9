"""Test that a call checks for signals while it computes, also if each element takes long."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from ascend_grad import _cpu, _openmp

#: Least time of a call that nothing disturbs, in seconds, and the largest share of it between two checks of signals.
#: The limit is a share and not a time, since a slow or busy machine stretches the call and the interval alike.
CALL = 0.3
SHARE = 1 / 4
#: Largest average time between two runs of a signal's handler, in seconds: twice CALL * SHARE.
INTERVAL = 0.15

SETUP = f"""
    import ctypes, signal, time
    import numpy as np
    import ascend_grad as ag

    record_reads = ctypes.CDLL(None).record_reads
    record_reads.argtypes, record_reads.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_long

    def tile(*shape):
        return np.full(shape, 0.5, np.float32)

    def half(*shape):
        return np.ones(shape, np.float16)

    def spent_on(call):
        begin = time.thread_time()
        call()
        return time.thread_time() - begin

    def longest_share(call):
        \"\"\"The longest time between two reads of the clock of signals' checks, as a share of a call's.\"\"\"
        reads = np.zeros(1 << 22)
        record_reads(reads.ctypes.data, len(reads))
        begin = time.thread_time()
        call()
        end = time.thread_time()
        count = record_reads(None, 0)
        assert count <= len(reads)
        return max(np.diff([begin, *reads[:count], end])) / (end - begin)

    def is_prompt(call):
        runs = []
        signal.signal(signal.SIGPROF, lambda *_: runs.append(None))
        signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
        seconds = spent_on(call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return len(runs) > max(seconds / {INTERVAL}, 1)  # one run may be after the call

    def check(call):
        shares = [longest_share(call)]
        while shares[-1] > {SHARE} and len(shares) < 5:  # the system, too, may take long, finding memory above all
            shares.append(longest_share(call))
        assert shares[-1] <= {SHARE}, shares
        assert any(is_prompt(call) for _ in range(3))
"""

#: Operator, array and axis for every path through the schedules. Some of the data is slow for its number of elements.
#: The script makes n as large as needed. Results lie in memory that was touched before, since the system cannot be
#: interrupted while it maps memory at the first touch.
ROWWISE = {
    "rows": ("softmax", "tile(n, 50_000)", "-1"),
    "long rows": ("log_softmax", "tile(3, 20_000 * n)", "-1"),
    "columns": ("softmax", "tile(n, 50_000)", "0"),
    "few columns": ("softmax", "tile(300 * n, 2, 2)", "1"),
    "long columns": ("softmax", "tile(20_000 * n, 3)", "0"),
    "transposed": ("softmax", "tile(20_000, n).T", "-1"),
    "transposed columns": ("softmax", "tile(20_000, n).T", "0"),
    "swapped": ("log_softmax", "tile(n, 50_000).astype('>f4')", "-1"),
    "subnormal results": ("softmax", "tile(n, 20_000) * np.arange(0, -40_000, -2, dtype=np.float32) / 200", "-1"),
    "float64": ("log_softmax", "tile(n, 30_000).astype(float)", "-1"),
    "float16": ("log_softmax", "tile(n, 50_000).astype(np.float16)", "-1"),
}
#: Statements that make the arguments, and the call without its number of threads.
LINEAR = {
    "rows aside": (
        "memory = np.ones((n, 20_001), np.float32); x, out = memory[:, 1:].T, memory[:, :-1].T",
        "ag.softmax(x, out=out, ",
    ),
    "gradient aside": (
        (
            "memory = np.ones((8, 500 * n + 1), np.float32); w, out = memory[:, 1:].T, memory[:, :-1].T; "
            "one = np.ones(1, np.float32)"
        ),
        (
            "ag.fused_linear_cross_entropy_loss_grad(one, tile(1, 8), w, np.ones(1, bool), np.zeros(1, int), "
            "logits_max=one, sum_exp_logits=one, out=(None, out), output_mask=(False, True), "
        ),
    ),
    "zeros": (
        (
            "w = np.broadcast_to(np.float32(1), (500 * n, 100)); out = np.ones((100, 500 * n), np.float32).T; "
            "one = np.zeros(1, np.float32)"
        ),
        (
            "ag.fused_linear_cross_entropy_loss_grad(one, tile(1, 100), w, np.ones(1, bool), np.zeros(1, int), "
            "logits_max=one, sum_exp_logits=one, out=(None, out), output_mask=(False, True), "
        ),
    ),
    "absent rows": (
        (
            "x = np.broadcast_to(np.float32(1), (500 * n, 100)); out = np.ones((100, 500 * n), np.float32).T; "
            "grad = np.zeros(500 * n, np.float32); grad[0] = 1"
        ),
        (
            "ag.fused_linear_cross_entropy_loss_grad(grad, x, tile(3, 100), grad == 1, np.zeros(len(x), int), "
            "logits_max=grad, sum_exp_logits=grad, out=(out, None), output_mask=(True, False), "
        ),
    ),
    "a weight of columns": (
        "x = tile(1, 2000); memory = np.ones((2000, 200 * n), np.float32); w = memory.T",
        "ag.fused_linear_online_max_sum(x, w, np.zeros(1, int), 0, len(w), ",
    ),
    "float16 weight": (
        "x = tile(64, 4096).astype(np.float16); w = np.ones((20 * n, 4096), np.float16)",
        "ag.fused_linear_online_max_sum(x, w, np.zeros(64, int), 0, len(w), ",
    ),
    "many tokens": (
        "x, w = tile(50_000 * n, 1), tile(2, 1)",
        "ag.fused_linear_online_max_sum(x, w, np.zeros(len(x), int), 0, 2, ",
    ),
    "long strided rows": (
        "x, w = tile(5, 10_000 * n), tile(10_000 * n, 20).T",
        "ag.linear_cross_entropy(x, w, np.zeros(5, int), workspace_bytes=2**32, ",
    ),
    "probabilities": (
        "x, numbers = tile(n, 50_000), [np.ones(n, np.float32)] * 3",
        "ag.fused_cross_entropy_loss_with_max_sum(*numbers, vocab_parallel_logits=x, out=(None, half(*x.shape)), ",
    ),
    "probabilities of one row": (
        "x, numbers = tile(1, 50_000 * n), [np.ones(1, np.float32)] * 3",
        "ag.fused_cross_entropy_loss_with_max_sum(*numbers, vocab_parallel_logits=x, out=(None, half(*x.shape)), ",
    ),
    "losses": (
        "numbers = np.ones(50_000 * n, np.float32)",
        "ag.fused_cross_entropy_loss_with_max_sum(numbers, numbers, numbers, out=(half(50_000 * n), None), ",
    ),
    "statistics": (
        "x, w = tile(500, n), tile(50_000, n)",
        "ag.fused_linear_online_max_sum(x, w, np.zeros(500, int), 0, 9, ",
    ),
    "largest logits": (
        "x, w = tile(500, n), tile(50_000, n)",
        "ag.linear_top_k(x, w, 128, ",
    ),
    "largest logits of many tokens": (
        "x, w = tile(10_000 * n, 1), tile(128, 1)",
        "ag.linear_top_k(x, w, 128, ",
    ),
    "largest logits of few tokens": (
        "x, w = tile(20, 20), tile(10_000 * n, 20)",
        "ag.linear_top_k(x, w, 128, ",
    ),
    "many features": (
        "x, w = tile(n // 5, 300_000), tile(n // 5, 300_000)",
        "ag.linear_cross_entropy(x, w, np.zeros(n // 5, int), ",
    ),
    "many rows": (
        "x, w = tile(1000 * n, 20), tile(200, 20)",
        "ag.linear_cross_entropy(x, w, np.zeros(1000 * n, int), ",
    ),
    "many words": (
        "x, w = tile(20, 20), tile(10_000 * n, 20)",
        "ag.linear_cross_entropy(x, w, np.zeros(20, int), ",
    ),
    "strides": (
        "x, w = tile(300, n).T, tile(300, 20_000).T",
        "ag.linear_cross_entropy(x, w, np.zeros(n, int), ",
    ),
}


def script_of(name: str) -> str:
    if name in LINEAR:
        arguments, call = LINEAR[name]
        call = f"{call}num_threads=1)"
    else:
        operator, array, axis = ROWWISE[name]
        arguments = f"x = {array}; out = np.ones(x.shape, x.dtype)"
        call = f"ag.{operator}(x, {axis}, out=out, num_threads=1)"
    return textwrap.dedent(SETUP) + textwrap.dedent(f"""
        def bound(n):
            {arguments}
            return lambda: {call}

        n = 50
        while (seconds := spent_on(call := bound(n))) < {CALL} or (seconds := spent_on(call)) < {CALL}:
            n *= 2 if seconds > {CALL} / 3 else 4
        check(call)
    """)


@pytest.fixture(scope="module")
def recorded_clock(tmp_path_factory) -> str:
    """Build a library that, preloaded into a process, records when a thread reads the clock, and return its path."""
    library = tmp_path_factory.mktemp("clock") / "recorded_clock.so"
    source = Path(__file__).parents[1] / "support" / "recorded_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    return str(library)


def test_a_given_number_of_threads_needs_no_cpu_time(run_script, recorded_clock):
    """The CPU time of threads affects only default numbers of threads. Reading it takes up to a microsecond."""
    script = """
        import ctypes, time
        import numpy as np
        import ascend_grad as ag
        reads = ctypes.CDLL(None).take_cpu_time_reads
        time.thread_time()
        assert reads() == 1
        x = np.ones((64, 128), np.float32)
        for threads in (1, 2, 3):
            ag.softmax(x, num_threads=threads)
            assert reads() == 0
    """
    run_script(script, LD_PRELOAD=recorded_clock)


@pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")
def test_short_calls_need_no_cpu_time(run_script, recorded_clock):
    """Reading the CPU time takes a noticeable part of a short call. Long calls read it to find busy cores."""
    script = """
        import ctypes, time
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import _openmp, _threads
        reads = ctypes.CDLL(None).take_cpu_time_reads
        ag.set_num_threads(2)
        _threads.detect_oversubscription(False)
        short, long = np.ones((64, 2048), np.float32), np.ones((2048, 2048), np.float32)
        for x in (short, long):
            for _ in range(50):
                reads()
                ag.softmax(x)
            assert _openmp.last_team_size() == 2
            assert (reads() > 0) == (x is long)
    """
    run_script(script, LD_PRELOAD=recorded_clock)


@pytest.mark.parametrize("name", [*ROWWISE, *LINEAR])
def test_signals_are_checked_in_time(name, run_script, needs_memory, recorded_clock):
    needs_memory(6)
    run_script(
        script_of(name),
        ASCEND_GRAD_CPU=_cpu.supported_variants()[0],
        LD_PRELOAD=recorded_clock,
        # Freed memory is reused, so that only the first call waits until the system has found memory.
        MALLOC_MMAP_MAX_="0",
        MALLOC_TRIM_THRESHOLD_=str(1 << 40),
    )
