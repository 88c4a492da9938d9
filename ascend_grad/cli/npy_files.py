"""Arrays in ``.npy`` files: opening any of them, writing new ones whole or not at all."""

from __future__ import annotations

import errno
import io
import math
import os
import secrets
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

import numpy as np
from numpy.lib import format as npy

from ..arrays import native
from .array_file import ArrayFile
from .errors import CommandError, reason, writing
from .other_formats import advice

#: The dtype that NumPy reads from bfloat16 files that it has written: the size of an element without its meaning.
RAW = np.dtype("V2")
#: Dtypes in which programs without bfloat16 keep its bits.
RAW_INTEGERS = (np.dtype(np.int16), np.dtype(np.uint16))

_KINDS = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}

#: NumPy's function that reads a header, and the bytes of the header's length, by the format's version.
_HEADERS = {(1, 0): (npy.read_array_header_1_0, 2), (2, 0): (npy.read_array_header_2_0, 4)}
#: Bytes of a header, NumPy's own limit: the parser of longer ones can end the process.
_HEADER_LIMIT = 10_000


@contextmanager
def open_array(path: str, raw_dtype: np.dtype | None) -> Iterator[ArrayFile]:
    """Open the array of a ``.npy`` file.

    Parameters
    ----------
    path : str
        The file.
    raw_dtype : dtype or None
        What elements of two raw bytes mean; None: they are refused.

    Raises
    ------
    CommandError
        If the file is not what it should be.
    OSError
        If it cannot be opened.
    """
    if not path:
        raise CommandError("the name of an input is empty")
    if os.path.isdir(path):
        raise CommandError(f"{path}: expected a .npy file, got a directory that is no Zarr array")
    require_regular_file(path)
    with open(path, "rb") as file:
        try:
            found = advice(path, file)
            if found is not None:
                raise CommandError(f"{path}: expected a .npy file; {found}")
            file.seek(0)
            magic = file.read(len(npy.MAGIC_PREFIX))
            if magic != npy.MAGIC_PREFIX:
                problem = "expected a .npy file, as numpy.save writes" if magic else "the file is empty"
                raise CommandError(f"{path}: {problem}")
            shape, fortran_order, dtype = _read_header(file)
            offset = file.tell()
            needed, there = offset + dtype.itemsize * math.prod(shape), os.fstat(file.fileno()).st_size
            if needed > there:
                raise ValueError(f"it is truncated, {there} bytes of {needed}")
            file.seek(0)
            # NumPy keeps no byte order with raw elements, so that dtype has lost what the header says.
            is_swapped = dtype == RAW and b"'>V2'" in file.read(offset)
            dtype = meaning(dtype, raw_dtype, path)
            dtype = dtype.newbyteorder(">") if is_swapped else dtype
            array = ArrayFile(path, file.fileno(), offset, shape, dtype, fortran_order)
        except CommandError:
            raise
        except OSError as error:
            raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
        except Exception as error:  # for a broken header NumPy's parser lets through whatever Python's raises
            raise CommandError(f"{path}: expected a .npy file of numbers: {reason(error)}") from error
        yield array


def checked_targets(paths: list[str], sources: list[str]) -> list[str]:
    """Return the paths of results after following links. Refuse inputs, and paths that cannot be replaced.

    Raises
    ------
    CommandError
        With the reason.
    """
    targets = [_checked_target(path, sources) for path in paths]
    for path, target in zip(paths, targets):
        if targets.count(target) > 1:
            raise CommandError(f"{path}: expected a file for each result, got this one twice")
    return targets


@contextmanager
def new_npy(target: str, shape: tuple[int, ...], dtype: np.dtype, fortran_order: bool) -> Iterator[ArrayFile]:
    """Make a new ``.npy`` file, which the block fills and which gets its name at the end of the block.

    The disk space is taken first. If the block fails nothing remains, and a file that had the name stays as it was.

    Parameters
    ----------
    target : str
        The file's name, from `checked_target`.
    shape, dtype, fortran_order
        The array.

    Raises
    ------
    CommandError
        If the file cannot be created, or the disk is full.
    """
    header = io.BytesIO()
    npy.write_array_header_1_0(
        header, {"descr": npy.dtype_to_descr(dtype), "fortran_order": fortran_order, "shape": shape}
    )
    offset = header.tell()
    directory = os.path.dirname(target)
    # The file is in the same directory, so that the last step is one atomic renaming within one file system.
    partial = os.path.join(directory, f".ascend-grad-{secrets.token_hex(8)}.part")
    try:
        with _created(partial, target) as file:
            with writing(target):
                _take_permissions(file, target)
            _reserve(file, offset + dtype.itemsize * math.prod(shape), target)
            with writing(target):
                file.write(header.getvalue())
                file.flush()
            yield ArrayFile(target, file.fileno(), offset, shape, dtype, fortran_order)
            with writing(target):
                os.fsync(file.fileno())
        with writing(target):
            os.replace(partial, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    sync_directory(directory)


def _checked_target(path: str, sources: list[str]) -> str:
    if not path:
        raise CommandError("the name of a result is empty")
    if path.endswith(".npz"):
        raise CommandError(f"{path}: ends in .npz, but the result is a .npy file")
    if path.rstrip("/").endswith(".zarr"):
        for source in sources:
            os.stat(source)  # an input that does not exist is the error to report
        raise CommandError(f"{path}: ends in .zarr, but the result of .npy files is a .npy file")
    if path.endswith("/") and not os.path.exists(path):
        raise CommandError(f"{path}: names a directory, but the result is a file")
    with suppress(FileNotFoundError):
        require_regular_file(path)
    target = os.path.realpath(path)
    directory = os.path.dirname(target)
    if not os.path.isdir(directory):
        raise CommandError(f"{path}: there is no directory {directory}")
    if os.path.lexists(target):
        for source in sources:
            if os.path.exists(source) and os.path.samefile(target, source):
                raise CommandError(f"{path}: this is the input {source}; inputs are not overwritten")
        if not os.access(target, os.W_OK):
            raise CommandError(f"{path}: not writable")
    return target


def require_regular_file(path: str) -> os.stat_result:
    """Return the status of a file that exists; raise `CommandError` if it is a directory, a device or a pipe."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
        raise CommandError(f"{path}: expected a regular file, got a {kind}")
    return status


def _created(partial: str, target: str) -> IO[bytes]:
    try:
        return open(partial, "x+b")
    except OSError as error:
        raise CommandError(f"{target}: cannot create a file in its directory: {error.strerror}") from error


def _take_permissions(file: IO[bytes], target: str) -> None:
    """Give a file owner and permissions of the one that it replaces, if there is one."""
    with suppress(FileNotFoundError):
        status = os.stat(target)
        with suppress(PermissionError):  # only root may give it to others
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    file.seek(0)
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(
            f"version {version[0]}.{version[1]} of the format is for structured arrays, which are not supported"
        )
    read_header, size_of_length = _HEADERS[version]
    length = int.from_bytes(file.read(size_of_length), "little")
    if length > _HEADER_LIMIT:  # NumPy would look at it when it has read all of it
        raise ValueError(f"its header has {length} bytes, expected at most {_HEADER_LIMIT}")
    file.seek(npy.MAGIC_LEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about headers by Python 2, and of Python's parser
        shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if dtype.subdtype is not None:
        raise ValueError(f"its elements are arrays of dtype {dtype}")
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    return shape, fortran_order, dtype


def meaning(dtype: np.dtype, raw_dtype: np.dtype | None, path: str) -> np.dtype:
    """Return the dtype of elements of a stored one: for raw elements and integers of 2 bytes, what the user gave.

    Raises
    ------
    CommandError
        If elements are raw, and the user gave no dtype.
    """
    if native(dtype) not in (RAW, *RAW_INTEGERS):
        return dtype
    if raw_dtype is not None:
        return raw_dtype.newbyteorder(dtype.byteorder)
    if dtype == RAW:
        raise CommandError(f"{path}: elements of 2 raw bytes; if this is bfloat16, add --dtype bfloat16")
    return dtype


def check_raw_dtype(raw_dtype: np.dtype | None, dtypes: Mapping[str, np.dtype]) -> None:
    """Raise an error if the user gave a dtype for raw elements and no input has it, or if integers need one.

    `dtypes` has the dtype of each input that is not to have integers, by its path.
    """
    if raw_dtype is None:
        for path, dtype in dtypes.items():
            if native(dtype) in RAW_INTEGERS:
                advice = "if these are the bits of bfloat16, add --dtype bfloat16"
                raise CommandError(f"{path}: expected floating-point numbers, got {dtype}; {advice}")
    elif raw_dtype not in map(native, dtypes.values()):
        path, dtype = next(iter(dtypes.items()))
        raise CommandError(f"{path}: --dtype {raw_dtype} is for elements of 2 raw bytes, int16 or uint16, not {dtype}")


def _reserve(file: IO[bytes], size: int, name: str) -> None:
    """Take the disk space of a whole file now, since a mapped page that finds no space later ends the process."""
    disk = os.fstatvfs(file.fileno())
    free = disk.f_bavail * disk.f_frsize
    try:
        # Free space is checked first, since some file systems notice a full disk late.
        if size > free and disk.f_blocks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise CommandError(f"{name}: cannot reserve {size} bytes ({free} are free): {error.strerror}") from error


def sync_directory(directory: str) -> None:
    """Make a renaming last. The file is complete by now, so that a file system without this is no failure."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
