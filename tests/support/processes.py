"""Run the command line or ranks in processes, measure memory, and name the CPU's features."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

#: A script that runs the command line. It restores signal handlers, as the parent of the tests may ignore signals.
_SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from ascend_grad.cli.main import main
sys.exit(main())
"""


#: A script that makes the process stop itself at the n-th call of a function, which is an attribute of `owner`.
_STOPPING = """
import functools, os, pkgutil, signal
owner, name, call = pkgutil.resolve_name({owner!r}), {name!r}, {call}
function, calls = getattr(owner, name), 0

@functools.wraps(function)
def stopping(*args, **kwargs):
    global calls
    calls += 1
    if calls == call:
        os.kill(os.getpid(), signal.SIGSTOP)
    return function(*args, **kwargs)

setattr(owner, name, stopping)
"""


def start(*argv: str, before: str = "") -> subprocess.Popen[str]:
    """Start ``ascend-grad`` with these arguments in the current directory, after other code if given."""
    return subprocess.Popen(
        # "-P": the current directory may be the source tree, whose package has no compiled modules.
        [sys.executable, "-P", "-c", before + _SCRIPT, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@contextmanager
def stopped(owner: str, name: str, call: int, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``ascend-grad``, and wait until it is about to call a function for the n-th time. Kill it at the end."""
    with start(*argv, before=_STOPPING.format(owner=owner, name=name, call=call)) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), process.communicate()
            yield process
        finally:
            process.kill()


def end_stopped(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    """Send a signal to a stopped process, let it go on, and return its stdout and stderr."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    return process.communicate()


def run_ranks(commands: Sequence[list], timeout: float | None = None) -> list[tuple[int, str]]:
    """Run a Python process for each rank, all at the same time, and return their exit statuses and outputs.

    A command is the arguments of Python. Processes that still run when the wait fails are killed.
    """
    with ExitStack() as ends:
        processes = []
        for arguments in commands:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            ends.enter_context(process)
            ends.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs)]


#: Bytes by which a process may grow for reasons other than the call.
SLACK = 8 << 20

RESIDENT = """
    def resident(name):
        \"\"\"Bytes: VmHWM is the largest resident size so far, Rss and Anonymous are exact sizes of now.\"\"\"
        with open("/proc/self/status" if name == "VmHWM" else "/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

    def leave_nothing(calls, first, count, limit, *kept):
        \"\"\"Check that calls after the first ones keep no memory beyond a limit, and no references to objects.

        A leak grows in each of three series. A series without it may grow once, by an allocator's own memory.
        \"\"\"
        import gc, sys
        calls(first)
        gc.collect()
        references = [sys.getrefcount(each) for each in kept]
        for series in range(3):
            before = resident("Rss")
            calls(count)
            gc.collect()
            grown = resident("Rss") - before
            assert [sys.getrefcount(each) for each in kept] == references
            if grown < limit:
                break
        assert grown < limit, grown
"""


def with_resident(script: str) -> str:
    return textwrap.dedent(RESIDENT) + textwrap.dedent(script)


def cpu_flags() -> set[str]:
    """Return the CPU's features by Linux's names, or none on an emulated CPU, where Linux lists the host's features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = "Features" if platform.machine() == "aarch64" else "flags"
    return {flag for line in lines if line.startswith(name) for flag in line.split(":")[1].split()}
