"""The command line ``ascend-grad``. Each command is a module here with texts for its help, `add_options` and `run`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, cast

from .._version import __version__
from ..errors import AscendGradError
from . import apply, bench, check, demo, info, score
from .errors import CommandError
from .exit_statuses import FAILED, exit_statuses
from .options import CommandParser, add_command

EPILOG = """\
examples:
  ascend-grad demo
  ascend-grad apply softmax_backward --grad-output g.npy --output y.npy -o dx.npy
  ascend-grad score hidden.npy weight.npy targets.npy -o log_prob.npy
  ascend-grad info --json

'ascend-grad COMMAND --help' describes a command, with its files, its time and its exit statuses.
"""

STATUSES = exit_statuses("the command completed its task", "the command completed, but a check failed")


class _Terminated(BaseException):
    """A signal to end this process. It is raised so that cleanup code runs."""

    def __init__(self, number: int):
        self.number = number


class _NamedStream:
    """A wrapper of a stream that names the stream in its errors."""

    def __init__(self, stream: IO[str], name: str):
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._naming():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self._stream.flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Python flushes buffers at exit. It would report the error again and change the exit status.
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            error.filename = self._name
            raise


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = CommandParser(
        prog="ascend-grad",
        description="Fast softmax and cross-entropy, with gradients, for NumPy arrays and files.",
        epilog=f"{EPILOG}\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ascend-grad {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (demo, apply, score, bench, check, info):
        name = command.__name__.rpartition(".")[2]
        end = "\n".join(filter(None, (command.EPILOG, command.STATUSES)))
        added = add_command(subparsers, name, help=command.SUMMARY, description=command.DESCRIPTION, end=end)
        added.set_defaults(func=command.run)
        command.add_options(added)
    parser.hints = apply.operator_hints("command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; default: the arguments of the process.

    Returns
    -------
    int
        The exit status: 0; 1 if the command found something wrong; 2 if it could not complete its task; 128 plus the
        signal's number if a signal ended it.
    """
    with _standard_streams():
        try:
            args = build_parser().parse_args(argv)
        except OSError:  # of argparse before Python 3.11.4, if a message cannot be written
            return FAILED
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        with _signals_as_exceptions():
            status = args.func(args)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _end(args, "interrupted", 128 + signal.SIGINT)
    except _Terminated as ended:
        return _end(args, "terminated", 128 + ended.number)
    except BrokenPipeError:  # the reader of the output has closed it
        return 128 + signal.SIGPIPE
    except (CommandError, AscendGradError) as error:
        return _end(args, f"error: {error}", FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _end(args, f"error: {where}{error.strerror or error}", FAILED)
    except MemoryError as error:
        return _end(args, f"error: out of memory: {error}", FAILED)


def _end(args: argparse.Namespace, message: str, status: int) -> int:
    with suppress(OSError):  # stderr, too, may be on a full disk or closed
        print(f"ascend-grad {args.command}: {' '.join(message.split())}", file=sys.stderr)
    return status


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Open stdin, stdout and stderr if they are closed, and name the last two in their errors.

    Stdout escapes characters that its encoding lacks, as stderr does by default.
    """
    # A file that is opened later, such as a result, would get the descriptor of a closed standard stream.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    with ExitStack() as streams:
        nowhere = streams.enter_context(open(descriptor, "w", encoding="utf-8"))
        if sys.stdout is None:
            streams.enter_context(redirect_stdout(nowhere))
        if sys.stderr is None:
            streams.enter_context(redirect_stderr(nowhere))
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        streams.enter_context(redirect_stdout(cast(IO[str], _NamedStream(sys.stdout, "standard output"))))
        streams.enter_context(redirect_stderr(cast(IO[str], _NamedStream(sys.stderr, "standard error"))))
        yield


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception, as SIGINT does, instead of ending the process immediately."""

    def handle(number: int, frame: object) -> None:
        raise _Terminated(number)

    changed = []
    # Signal handlers can be set by the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handle)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
