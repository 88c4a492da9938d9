"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

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
