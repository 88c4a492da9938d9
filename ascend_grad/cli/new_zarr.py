"""New Zarr arrays, written part by part to a hidden directory, where a later run of the same command goes on.

The directory ``.NAME.ascend-grad-part`` lies in the result's directory and holds the array, which gets its name when
it is complete. A record in the array says what was computed, and from what. It is kept: the same command then finds a
complete result, and notices chunks that were lost or changed.

The directory may lie where others can write. So nothing in it is used unless it belongs to this array: paths come from
the array's grid, never from the record, and links are not followed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, NamedTuple

from .errors import CommandError, writing
from .npy_files import sync_directory
from .zarr_grid import Grid

#: The name of the record. Each line is JSON: one for each item of the description, then one for each finished part.
RECORD = ".ascend-grad.jsonl"
#: Advice for a complete result that differs from the requested one.
REPLACE_ADVICE = "name another result, or remove this one"
#: Bytes of a line of the record: more than three paths of the longest kind need.
_LINE_LIMIT = 2**17
_READ_AT_ONCE = 2**20
_FINISHED = re.compile(r'\[([0-9]{1,18}), "([0-9a-f]{64})", "([0-9a-f]{64})"\]')


class Layout(NamedTuple):
    """Describe a new array: the files that it consists of, and what decides on their contents."""

    #: The files that describe the array, and what is in them.
    metadata: Mapping[str, bytes]
    #: The chunks, or shards.
    grid: Grid
    #: All that decides on the contents but for the contents of the inputs, as JSON takes it.
    description: Mapping[str, Any]
    #: The number of parts. Each has a number, and whole cells of the grid.
    parts: int

    def has(self, path: str, is_folder: bool) -> bool:
        """Return whether a file or a folder belongs to the array."""
        return (not is_folder and path in (RECORD, *self.metadata)) or self.grid.has(path, is_folder)


class WrittenArray:
    """Hold an array and its record, which says which parts are finished.

    Parameters
    ----------
    folder : str
        The array.
    record : file
        The record, at its beginning.
    layout : Layout
    advice : str
        What to do where the array, or its record, is not what was written; the end of a message.
    """

    def __init__(self, folder: str, record: IO[bytes], layout: Layout, advice: str):
        self._folder, self._file, self._layout, self._advice = folder, record, layout, advice
        self._description = [json.dumps(item) for item in layout.description.items()]
        #: The digests of the inputs' state and of the chunks, by the number of a part.
        self.finished: dict[int, tuple[str, str]] = {}
        self._whole_bytes, self.is_begun = 0, False
        self._read_record()

    def why_unfinished(self, part: int, inputs: str, keys: Iterable[str]) -> str | None:
        """Return why a part has to be computed, or None if it is finished.

        Parameters
        ----------
        part : int
            The number of the part.
        inputs : str
            The digest of the inputs' state.
        keys : iterable of str
            The keys of its chunks.
        """
        if part not in self.finished:
            return "is not finished"
        before, chunks = self.finished[part]
        if before != inputs:
            return "was computed from other inputs"
        return None if chunks == self._digest_of_files(keys) else "has lost a chunk, or one that was changed"

    def check_metadata(self) -> None:
        """Raise `CommandError` unless the files that describe the array are what was written."""
        for name, content in self._layout.metadata.items():
            if self._digest_of_files([name]) != _digest_of_chunks({name: content}):
                raise CommandError(f"{os.path.join(self._folder, name)}: not what was written there; {self._advice}")

    def _read_record(self) -> None:
        count = len(self._description)
        for number, line in enumerate(iter(lambda: self._file.readline(_LINE_LIMIT), b"")):
            if not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
                break  # the last line may have been cut
            text = line.decode("ascii", "replace").removesuffix("\n")
            if number < count:
                self._check_same(text, self._description[number])
            else:
                match = _FINISHED.fullmatch(text)
                if match is None or int(match[1]) >= self._layout.parts:
                    raise self._damaged()
                self.finished[int(match[1])] = match[2], match[3]
            self._whole_bytes += len(line)
            self.is_begun = number + 1 >= count

    def _check_same(self, old: str, new: str) -> None:
        if old == new:
            return
        name, value = json.loads(new)
        head, tail = f"{json.dumps([name])[:-1]}, ", "]"
        if not (old.startswith(head) and old.endswith(tail) and old.isprintable()):
            raise self._damaged()
        before = old.removeprefix(head).removesuffix(tail)
        raise CommandError(f"{self._folder}: was begun with {name} {before}, not {json.dumps(value)}; {self._advice}")

    def _damaged(self) -> CommandError:
        return CommandError(f"{os.path.join(self._folder, RECORD)}: a damaged record; {self._advice}")

    def _digest_of_files(self, keys: Iterable[str]) -> str | None:
        """Return the digest of files that were written, None where one of them is not there, or is no file."""
        digest = hashlib.blake2b(digest_size=32)
        for key in keys:
            try:
                with _opened_without_links(self._folder, key) as file:
                    digest.update(_heading(key, os.fstat(file.fileno()).st_size))
                    while data := file.read(_READ_AT_ONCE):
                        digest.update(data)
            except (OSError, CommandError):
                return None
        return digest.hexdigest()


class NewArray(WrittenArray):
    """Write a Zarr array into a new directory."""

    def __init__(self, path: str, outer: str, inner: str, record: IO[bytes], layout: Layout):
        super().__init__(inner, record, layout, f"remove {outer} to begin anew")
        self._path = path
        self._unfinished = f"{inner}.part"  # outside the array, which then holds complete chunks only

    def begin(self) -> None:
        """Write what describes the array, unless an earlier run has."""
        if self.is_begun:
            self.check_metadata()
        with writing(self._path):
            self._file.seek(self._whole_bytes if self.is_begun else 0)
            self._file.truncate()
            if not self.is_begun:
                self._write_files(self._layout.metadata)
                self._append(self._description)

    def write(self, part: int, inputs: str, chunks: Mapping[str, bytes]) -> None:
        """Write a part to the disk, and only then what the record says of it.

        Parameters
        ----------
        part : int
            The number of the part.
        inputs : str
            The digest of the inputs' state before they were read.
        chunks : mapping of str to bytes
            The encoded chunks, by their keys.
        """
        digest = _digest_of_chunks(chunks)
        with writing(self._path):
            self._write_files(chunks)
            self._append([json.dumps([part, inputs, digest])])
        self.finished[part] = inputs, digest

    def _write_files(self, contents: Mapping[str, bytes]) -> None:
        folders = {self._folder}
        for key, content in contents.items():
            with suppress(FileNotFoundError):
                os.unlink(self._unfinished)
            with open(self._unfinished, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            path = os.path.join(self._folder, key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(self._unfinished, path)
            while (path := os.path.dirname(path)) not in folders:
                folders.add(path)
        for folder in sorted(folders, reverse=True):
            sync_directory(folder)

    def _append(self, lines: list[str]) -> None:
        self._file.writelines(f"{line}\n".encode() for line in lines)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def new_zarr(path: str, target: str, layout: Layout) -> Iterator[NewArray]:
    """Open a new array, which is filled in the block and has its name from the end of the block on.

    If the block fails, what was finished remains in the hidden directory, and nothing if nothing was.

    Parameters
    ----------
    path, target : str
        The name that was given, and the one that it stands for, which is free.
    layout : Layout

    Raises
    ------
    CommandError
        If something in the hidden directory does not belong to the array, another run is at work there, or a run with
        another description began.
    """
    parent, name = os.path.split(target)
    outer = os.path.join(parent, f".{name}.ascend-grad-part")
    # A level more than is needed: in a Zarr group, an array that is not complete is no member of the group.
    inner = os.path.join(outer, name)
    with _locked(path, outer, inner) as record:
        _check_belongings(outer, inner, layout)
        array = NewArray(path, outer, inner, record, layout)
        try:
            if os.path.lexists(target):
                raise CommandError(f"{path}: another run has finished it")
            array.begin()
            yield array
            with writing(path):
                if os.path.lexists(target):  # renaming would replace an empty directory
                    raise CommandError(f"{path}: appeared meanwhile, and is not replaced")
                os.rename(inner, target)
        finally:
            if not array.finished and os.path.lexists(inner):
                shutil.rmtree(outer)
    sync_directory(parent)
    with suppress(OSError):  # another run has begun to look there
        os.rmdir(outer)


def written_array(path: str, target: str, layout: Layout) -> WrittenArray:
    """Return the complete array of this name, whose record has the same description.

    Raises
    ------
    CommandError
        If there is something else of that name.
    """
    try:
        record = _open_regular(os.path.join(target, RECORD), os.O_RDONLY)
    except (OSError, CommandError):
        raise CommandError(f"{path}: is there already, and was not written by this command") from None
    with record:
        array = WrittenArray(path, record, layout, REPLACE_ADVICE)
    if not array.is_begun:
        raise CommandError(f"{path}: is there already, and its record is empty; {REPLACE_ADVICE}")
    array.check_metadata()
    return array


def _digest_of_chunks(contents: Mapping[str, bytes]) -> str:
    """Return the digest of keys, sizes and contents."""
    digest = hashlib.blake2b(digest_size=32)
    for key, content in contents.items():
        digest.update(_heading(key, len(content)))
        digest.update(content)
    return digest.hexdigest()


def _heading(key: str, size: int) -> bytes:
    return f"{key} {size}\n".encode()


@contextmanager
def _opened_without_links(folder: str, key: str) -> Iterator[IO[bytes]]:
    """Open a file of an array for reading, unless it or a folder between it and the array is a link."""
    *names, last = key.split("/")
    with ExitStack() as opened:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        opened.callback(os.close, parent)
        for name in names:
            parent = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            opened.callback(os.close, parent)
        yield opened.enter_context(_open_regular(last, os.O_RDONLY, parent))


def _open_regular(path: str, flags: int, parent: int | None = None) -> IO[bytes]:
    """Open a regular file, which is no link, relative to a directory; nothing waits for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CommandError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b")


@contextmanager
def _locked(path: str, outer: str, inner: str) -> Iterator[IO[bytes]]:
    """Open the record of the array in the hidden directory, which no other process has at the same time."""
    busy = CommandError(f"{path}: another run is at work on it")
    try:
        is_new = _make_folder(outer, 0o700)  # no other user can write there
        _make_folder(inner, 0o777)
        name = os.path.join(inner, RECORD)
        record = _open_regular(name, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:  # another run has renamed or removed a folder
        raise busy from None
    with record:
        status = os.fstat(record.fileno())
        if status.st_nlink > 1:
            raise _not_ours(name, outer)
        with writing(path):
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = os.path.samestat(status, os.lstat(name))
            except (FileNotFoundError, BlockingIOError):
                is_there = False
            except OSError:  # such as on a file system without locks, where no other run can be at work
                if is_new:
                    shutil.rmtree(outer)
                raise
        if not is_there:  # another run has the lock, or has renamed or removed what was opened here
            raise busy
        yield record


def _make_folder(path: str, mode: int) -> bool:
    """Make a directory, or check the one that is there; return whether it is new."""
    try:
        os.mkdir(path, mode)
        return True
    except FileExistsError:
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise CommandError(f"{path}: expected a directory of this user; remove it to begin anew")
    permissions = status.st_mode & 0o777
    if permissions & ~mode:
        raise CommandError(f"{path}: expected mode {mode:o}, got {permissions:o}; remove it to begin anew")
    return False


def _check_belongings(outer: str, inner: str, layout: Layout) -> None:
    """Raise `CommandError` where the hidden directory holds what this command does not write there."""
    folders = [outer]
    while folders:
        folder = folders.pop()
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            is_folder = stat.S_ISDIR(mode)
            if folder == outer:
                is_ours = path == (inner if is_folder else f"{inner}.part")
            else:
                is_ours = layout.has(os.path.relpath(path, inner), is_folder)
            if not is_ours or not (is_folder or stat.S_ISREG(mode)):
                raise _not_ours(path, outer)
            if is_folder:
                folders.append(path)


def _not_ours(path: str, outer: str) -> CommandError:
    return CommandError(f"{path}: not written by this command; remove {outer} to begin anew")
