"""Directories that a command fills piece by piece, and finishes where a run before it was ended.

Pieces are written to a hidden directory beside the one that is asked for, which gets its name when all of them are
there. A record in it says what was computed, and from which files. It is kept, so that whoever asks for the same again
is told that it is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .errors import CommandError
from .npy_files import sync_directory

if TYPE_CHECKING:
    from tqdm import tqdm

RECORD = ".ascend-grad.jsonl"
#: How the names of files end that were not renamed before the run was ended: this library's, and those of zarr.
_UNFINISHED = (".part", ".partial")


class Piece(NamedTuple):
    """A part of a result, computed at a time."""

    #: The files that it is computed from. It is computed again where one of them has changed.
    sources: list[str]
    #: The files that it is written to, below the directory.
    files: list[str]
    #: How much of the result it is.
    nbytes: int


def fill_directory(
    path: str,
    description: dict[str, Any],
    pieces: Mapping[str, Piece],
    prepare: Callable[[str], None],
    compute: Callable[[str, str], None],
    progress: tqdm,
) -> int:
    """Compute the pieces of a new directory that an earlier run has not computed.

    Parameters
    ----------
    path : str
        The directory.
    description : dict
        All that decides on the result, but for the contents of files, as JSON takes it.
    pieces : mapping of str to Piece
    prepare : callable
        Called once with the directory that is filled, before the first piece is computed.
    compute : callable
        Called with that directory and the name of a piece.
    progress : tqdm
        Told of pieces that are there already.

    Returns
    -------
    int
        The number of pieces that this run computed.

    Raises
    ------
    CommandError
        If there is something else of that name, another run is at work on it, or one with another description began.
    """
    target = os.path.realpath(path)
    parent, name = os.path.split(target)
    if not os.path.isdir(parent):
        raise CommandError(f"{path}: there is no directory {parent}")
    outer = os.path.join(parent, f".{name}.ascend-grad-part")

    def found() -> int:
        """What is there is the result: nothing is computed."""
        _check_is_complete(path, description, pieces)
        progress.update(sum(piece.nbytes for piece in pieces.values()))
        return 0

    if os.path.lexists(target):
        with suppress(OSError):
            os.rmdir(outer)
        return found()
    # One level more than is needed: within a Zarr group, an array that is not complete is no member of the group.
    inner = os.path.join(outer, name)
    os.makedirs(inner, exist_ok=True)
    with _locked(path, inner) as file:
        if os.path.lexists(target):  # finished by another run after this one has looked
            shutil.rmtree(outer)
            return found()
        record = _Record(file, inner)
        try:
            if record.finished:
                _check_same(path, record.description, description, f"remove {outer} to begin anew")
                _remove(inner, _left_over(inner))
                for each in record.finished.keys() - pieces.keys():
                    record.forget(each)
                    _remove(inner, [each])
            else:
                _remove(inner, [each for each in os.listdir(inner) if each != RECORD])
                prepare(inner)
                record.begin(description)
            computed = _compute_missing(inner, record, pieces, compute, progress)
        except BaseException:
            if not record.finished:
                shutil.rmtree(outer)
            raise
        _sync(inner, sorted(os.listdir(inner)))
        os.rename(inner, target)
    sync_directory(parent)
    with suppress(OSError):  # another run has begun to look there
        os.rmdir(outer)
    return computed


def _compute_missing(
    directory: str,
    record: _Record,
    pieces: Mapping[str, Piece],
    compute: Callable[[str, str], None],
    progress: tqdm,
) -> int:
    computed = 0
    for name, piece in pieces.items():
        state = _state(piece.sources)  # before they are read
        if record.finished.get(name) == state:
            progress.update(piece.nbytes)
            continue
        compute(directory, name)
        _sync(directory, piece.files)
        record.finish(name, state)
        computed += 1
    return computed


class _Record:
    """What was computed: a line with the description, then one for each piece, with the state of its sources."""

    def __init__(self, file: IO[bytes], directory: str):
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may have been cut
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            self.description: dict[str, Any] = lines[0] if lines else {}
            self.finished: dict[str, Any] = {
                name: state for name, state in dict(lines[1:]).items() if state is not None
            }
        except (ValueError, TypeError) as error:
            path = os.path.join(directory, RECORD)
            raise CommandError(f"{path}: damaged; remove {directory} to begin anew") from error
        self._file = file
        if len(whole) < len(text) and file.writable():
            file.truncate(len(whole))

    def begin(self, description: dict[str, Any]) -> None:
        """Of a result that has no pieces yet."""
        self._file.truncate(0)
        self._append(description)

    def finish(self, name: str, state: object) -> None:
        """A piece that was computed from sources in this state."""
        self._append([name, state])
        self.finished[name] = state

    def forget(self, name: str) -> None:
        """A piece that is no longer asked for: it will not be there, should its sources come back."""
        self._append([name, None])
        del self.finished[name]

    def _append(self, line: object) -> None:
        self._file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def _locked(path: str, directory: str) -> Iterator[IO[bytes]]:
    """The record of a directory, which no other process has at the same time."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.path.join(directory, RECORD), "a+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
        except (FileNotFoundError, BlockingIOError):
            is_there = False
        if not is_there:  # another run has the lock, or has renamed or removed what was opened here
            raise CommandError(f"{path}: another run is at work on it")
        file.seek(0)
        yield file


def _check_is_complete(path: str, description: dict[str, Any], pieces: Mapping[str, Piece]) -> None:
    """Raise unless this very result is there."""
    try:
        with open(os.path.join(path, RECORD), "rb") as file:
            record = _Record(file, path)
    except OSError:
        raise CommandError(f"{path}: is there already, and was not written by this command") from None
    _check_same(path, record.description, description, "name another directory, or remove this one")
    missing = [f"{name} is not in it" for name in pieces if name not in record.finished]
    changed = [
        f"{name} was computed from other files"
        for name, piece in pieces.items()
        if name in record.finished and record.finished[name] != _state(piece.sources)
    ]
    changed += [f"{name} has no input any more" for name in sorted(record.finished.keys() - pieces.keys())]
    if missing or changed:
        advice = "name another directory, or remove this one"
        raise CommandError(f"{path}: is there already, and {(missing + changed)[0]}; {advice}")


def _check_same(path: str, old: dict[str, Any], new: dict[str, Any], advice: str) -> None:
    for name in sorted(old.keys() | new.keys()):
        before, now = (json.dumps(each.get(name), sort_keys=True) for each in (old, new))
        if before != now:
            raise CommandError(f"{path}: was begun with {name} {before}, not {now}; {advice}")


def _state(paths: list[str]) -> list[list[int] | None]:
    """What changes with the contents of files: size and time of modification, None where there is no file."""
    states: list[list[int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)
            states.append([status.st_size, status.st_mtime_ns])
        except FileNotFoundError:
            states.append(None)
    return states


def _left_over(directory: str) -> Iterator[str]:
    """The files that an earlier run has not finished."""
    for folder, _, files in os.walk(directory):
        yield from (os.path.join(folder, name) for name in files if name.endswith(_UNFINISHED))


def _remove(directory: str, names: Iterable[str]) -> None:
    for name in names:
        path = os.path.join(directory, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.unlink(path)


def _sync(directory: str, files: list[str]) -> None:
    """Make files last, with all directories that they are in."""
    folders = set()
    for name in files:
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        while path != directory:
            path = os.path.dirname(path)
            folders.add(path)
    for folder in sorted(folders, reverse=True):
        sync_directory(folder)
