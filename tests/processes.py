"""The command line in a process of its own, how much memory a process takes, and work on another thread."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

#: What started the tests may have had signals ignored, and children inherit that.
_SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from ascend_grad.cli.main import main
sys.exit(main())
"""


def start(*argv: str) -> subprocess.Popen[str]:
    """Start ``ascend-grad`` with these arguments in the current directory."""
    return subprocess.Popen(
        # "-P": the current directory may be the source tree, whose package has no compiled modules.
        [sys.executable, "-P", "-c", _SCRIPT, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


#: Bytes that a process may grow by without a call being to blame.
SLACK = 8 << 20

RESIDENT = """
    def resident(name):
        \"\"\"Bytes: VmHWM is the largest resident size so far, RssAnon the anonymous memory now.\"\"\"
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
"""


def with_resident(script: str) -> str:
    return textwrap.dedent(RESIDENT) + textwrap.dedent(script)


def in_thread(function) -> None:
    """Run on a thread of its own; what fails there fails here."""
    errors = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
