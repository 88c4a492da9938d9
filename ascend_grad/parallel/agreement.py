"""Errors of one rank, which all ranks raise, and comparison of the arguments of all ranks.

Between two collective operations each rank works by itself, and may fail by itself: a bad argument, no memory, Ctrl-C.
If the rank raised at once, the others would wait for it permanently. So it keeps its exception and takes part in the
following operations, until one of them transfers the number of failed ranks; then all ranks raise.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from ..errors import AscendGradError, ParamInvalidError, RankError
from ..operators.options import OPTIONS
from .communicators import Collectives

_T = TypeVar("_T")

#: Bytes of a status record, the facts that a rank sends to the others. One size for all ranks needs one operation only.
RECORD_BYTES = 1024
#: Maximum length of the text of an exception on a record, in characters of JSON.
_TEXT_LENGTH = 700


class Attempt:
    """One rank's part of a call: runs the work between collective operations and keeps the first exception."""

    def __init__(self, operator: str):
        self.operator = operator
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def run(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of `work()`, or None if it raises or if something failed before."""
        if self.error is None:
            try:
                return work()
            except BaseException as error:  # also Ctrl-C: no rank may be left waiting
                if isinstance(error, AscendGradError):  # it may name an operator that this one calls
                    error.operator = self.operator
                self.error = error
        return None

    def raise_kept(self) -> None:
        """Raise the kept exception, if any. To be called if no collective operation follows that would report it."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # its traceback keeps this call's arrays alive

    def exchange_records(self, ranks: Collectives, facts: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Return the records of all ranks, or raise an exception on all of them if one failed.

        `facts` is this rank's record, replaced by the exception if this rank failed.
        """
        record = facts if self.error is None else {"error": _text(self.error)}
        packed = bytearray(_packed(record))
        try:
            records = ranks.allgather(np.frombuffer(packed, np.uint8))
        except AscendGradError as error:  # the caller's communicator returned something else
            error.operator = self.operator
            raise
        received = [_unpacked(row.tobytes()) for row in records]
        self.raise_kept()
        for rank, each in enumerate(received):
            if "error" in each:
                raise RankError(f"rank {rank} failed: {each['error']}", rank=rank, operator=self.operator)
        return received

    def settle(self, ranks: Collectives, failures: float) -> None:
        """Raise on every rank if `failures`, the sum of `failed` over the ranks, is not 0."""
        if failures:
            self.exchange_records(ranks, {})

    def share(self, ranks: Collectives) -> None:
        """Raise on every rank if one of them failed."""
        failures = np.array([self.failed], np.float32)
        ranks.allreduce(failures, "sum")
        self.settle(ranks, failures[0])


def _packed(record: dict[str, Any] | None) -> bytes:
    """Return a record as RECORD_BYTES bytes: its JSON text, compressed if it is too long."""
    text = json.dumps(record).encode()
    return (text if len(text) <= RECORD_BYTES else zlib.compress(text, 9)).ljust(RECORD_BYTES)


def _unpacked(packed: bytes) -> dict[str, Any]:
    is_text = packed.startswith(b"{")
    return json.loads(packed if is_text else zlib.decompressobj().decompress(packed))


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace").decode()
    while len(json.dumps(text)) > _TEXT_LENGTH:
        text = text[: len(text) * 3 // 4]
    return text


def check_agreement(
    facts: Sequence[dict[str, Any]], operator: str, advice: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that every fact is the same on all ranks; otherwise raise the same error on all of them.

    The facts of a rank leave out options that have their defaults. `advice` has what to do about facts that differ.
    """
    for rank, each in enumerate(facts):
        for name in {**facts[0], **each} if each != facts[0] else ():
            default = OPTIONS[name].default if name in OPTIONS else None
            first, other = (of_rank.get(name, default) for of_rank in (facts[0], each))
            if first != other:
                got = f"{first} on rank 0 and {other} on rank {rank}{advice.get(name, '')}"
                raise ParamInvalidError(f"{name}: expected the same on every rank, got {got}", operator=operator)
