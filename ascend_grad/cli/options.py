"""Command line options that several commands share."""

from __future__ import annotations

import argparse

from ..backends import CHOICES


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads`` and ``--backend``."""
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the library's CPU calls")
    parser.add_argument("--backend", choices=CHOICES, help="who computes (default: as in the library)")
