"""Command line options that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ..backends import CHOICES
from .errors import CommandError
from .exit_statuses import FAILED

if TYPE_CHECKING:
    from tqdm import tqdm


class CommandParser(argparse.ArgumentParser):
    """A parser that names its own help in errors. Options may stand between positional arguments."""

    #: What to do instead of a wrong choice, by the argument's `dest` and the choice.
    hints: Mapping[tuple[str, str], str] = MappingProxyType({})
    _collects_options = False

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices and (action.dest, value) in self.hints:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {self.hints[action.dest, value]}")
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is None and not self._collects_options:
            self._collects_options = True  # `parse_known_intermixed_args` may call this method
            try:
                namespace, unknown = self.parse_known_intermixed_args(args, namespace)
            finally:
                self._collects_options = False
        else:
            namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._collects_options:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def add_command(commands: Any, name: str, *, help: str, description: str, end: str) -> CommandParser:
    """Add a command, or a command of a command, whose help keeps its lines as they are, and return its parser."""
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=end,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def plain(text: str) -> str:
    """Return the first sentence of a documentation, without its markup and its capital, as the help has it."""
    text = re.sub(r":math:`([^`]*)`", r"\1", text).replace(r"\mathrm{lse}", "lse")
    text = text.partition(". ")[0].rstrip(".").replace("`", "")
    return f"{text[:1].lower()}{text[1:]}"


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads`` and ``--backend``."""
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads on the CPU (default: automatic)")
    parser.add_argument("--backend", choices=CHOICES, help="backend to use (default: as in the library)")


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype`` and ``--progress``."""
    parser.add_argument(
        "--dtype",
        choices=["bfloat16"],
        help="dtype of input elements that are stored as 2 raw bytes (as NumPy does), int16 or uint16",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar (default: if stderr is a terminal)",
    )


def check_file_names(names: Collection[str]) -> None:
    """Raise `CommandError` if a file is named "-", which other programs take for standard input or output."""
    if "-" in names:
        raise CommandError("-: standard input and output are not supported; name a file (./- for a file of this name)")


def progress_bar(args: argparse.Namespace, **settings: Any) -> Callable[..., tqdm]:
    """Return a function that makes a progress bar, as ``--progress`` wants it."""
    from tqdm import tqdm

    # For tqdm, None means: unless stderr is a terminal.
    return partial(tqdm, disable=None if args.progress is None else not args.progress, **settings)
