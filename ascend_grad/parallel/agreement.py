"""How an error of one rank becomes an error of all of them, and how arguments of several ranks are compared.

Between two collective operations each rank works by itself, and may fail by itself: a bad argument, no memory, Ctrl-C.
A rank that left then would leave the others waiting. So it keeps its exception and takes part in the operations that
follow, until one of them carries a number that says so; then all ranks raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import AscendGradError, ParamInvalidError, RankError
from .communicators import Collectives

_T = TypeVar("_T")

#: What every rank tells the others, as JSON: of one size, so that one collective operation does.
CARD_BYTES = 1024
#: Characters of an exception that the others are told, at most.
_TEXT_LENGTH = 700


class Attempt:
    """One rank's part of a call: what it does between collective operations, and the exception that it kept."""

    def __init__(self, operator: str):
        self.operator = operator
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def run(self, work: Callable[[], _T]) -> _T | None:
        """Do it unless something failed before; None where it fails."""
        if self.error is None:
            try:
                return work()
            except BaseException as error:  # Ctrl-C, too: nobody may be left waiting
                if isinstance(error, AscendGradError):  # of an operator that this one calls, maybe
                    error.operator = self.operator
                self.error = error
        return None

    def raise_kept(self) -> None:
        """Raise what was kept, where no collective operation follows that would tell the others."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # whose traceback refers to all that there is here

    def tell(self, ranks: Collectives, facts: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What every rank tells (not looked at where this one failed), or an exception if a rank failed."""
        card = facts if self.error is None else {"error": _text(self.error)}
        written = bytearray(json.dumps(card).encode().ljust(CARD_BYTES))
        try:
            cards = ranks.allgather(np.frombuffer(written, np.uint8))
        except AscendGradError as error:  # a communicator that is none
            error.operator = self.operator
            raise
        told = [json.loads(row.tobytes()) for row in cards]
        self.raise_kept()
        for rank, each in enumerate(told):
            if "error" in each:
                raise RankError(f"rank {rank} failed: {each['error']}", rank=rank, operator=self.operator)
        return told

    def settle(self, ranks: Collectives, failures: float) -> None:
        """Raise on every rank, if this sum of `failed` over the ranks is not 0."""
        if failures:
            self.tell(ranks, {})

    def share(self, ranks: Collectives) -> None:
        """Raise on every rank, if one of them failed."""
        failures = np.array([self.failed], np.float32)
        ranks.allreduce(failures, "sum")
        self.settle(ranks, failures[0])


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace").decode()
    while len(json.dumps(text)) > _TEXT_LENGTH:
        text = text[: len(text) * 3 // 4]
    return text


def check_agreement(facts: Sequence[dict[str, Any]], operator: str) -> None:
    """Every fact is the same on all ranks: else the same error on all of them."""
    for rank, each in enumerate(facts):
        for name, value in facts[0].items():
            if each.get(name) != value:
                got = f"{value} on rank 0 and {each.get(name)} on rank {rank}"
                raise ParamInvalidError(f"{name}: expected the same on every rank, got {got}", operator=operator)
