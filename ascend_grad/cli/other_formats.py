"""Files of other formats than ``.npy``: their names, and how to convert them."""

from __future__ import annotations

import json
import os
import zipfile
from typing import IO

from .errors import listed

_TORCH = "torch.load(PATH)['NAME'].numpy()"
#: What else holds for files of torch.save.
_OF_TORCH = (
    "; leave out ['NAME'] if the file is one tensor, insert .detach() if it requires grad, and for bfloat16 use"
    " .view(torch.int16).numpy() and --dtype bfloat16"
)
#: What files begin with, what they are then, and Python that gives an array of them. PATH is the file's name.
_FORMATS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "h5py.File(PATH)['NAME'][:]"),
    (b"PAR1", "a Parquet file", "pandas.read_parquet(PATH).to_numpy()"),
    (b"ARROW1", "an Arrow file", "pandas.read_feather(PATH).to_numpy()"),
    (b"MATLAB 5.0", "a MATLAB file", "scipy.io.loadmat(PATH)['NAME']"),
    (b"CDF\x01", "a NetCDF file", "xarray.open_dataset(PATH)['NAME'].to_numpy()"),
    (b"CDF\x02", "a NetCDF file", "xarray.open_dataset(PATH)['NAME'].to_numpy()"),
    # Python's protocols from 2 on; torch.save wrote such files before PyTorch 1.6.
    *((bytes([0x80, protocol]), "a pickle, which is never loaded", _TORCH) for protocol in range(2, 6)),
)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
#: Bytes of a file that are looked at.
_HEAD = 512
#: Bytes of the largest description of a safetensors file that is read.
_DESCRIPTION_LIMIT = 2**24


def advice(path: str, file: IO[bytes]) -> str | None:
    """Return what a file is and how to make a ``.npy`` file of it; None if it is unknown, or a ``.npy`` file."""
    file.seek(0)
    head = file.read(_HEAD)
    if head.startswith(b"\x93NUMPY"):
        return None
    if head.startswith(b"PK"):
        return _of_zip(path, file)
    if head.startswith(_COMPRESSED):
        return "it is compressed; decompress it first"
    for magic, kind, array in _FORMATS:
        if head.startswith(magic):
            return f"it is {kind}; {_saving(array, path)}{_OF_TORCH if array == _TORCH else ''}"
    names = _tensors(file, head)
    if names is not None:
        how = _saving("safetensors.numpy.load_file(PATH)['NAME']", path)
        bfloat16 = "for bfloat16, import ml_dtypes first, and pass --dtype bfloat16"
        return f"it is a safetensors file with the tensors {listed(names)}; {how} ({bfloat16})"
    if head and not os.path.basename(path).endswith(".npy") and _is_text(head):
        if not _is_number((head.replace(b",", b" ").split() or [b""])[0]):
            return "it is text"
        separator = ", delimiter=','" if b"," in head else ""
        return f"it is text; {_saving(f'numpy.loadtxt(PATH{separator})', path)}"
    return None


def _saving(array: str, path: str) -> str:
    return f"convert it with numpy.save('FILE.npy', {array.replace('PATH', repr(path))})"


def _of_zip(path: str, file: IO[bytes]) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return "it is a damaged zip archive"
    if any(name.endswith("/data.pkl") for name in names):
        return f"it is a file of torch.save; {_saving(_TORCH, path)}{_OF_TORCH}"
    if any(name.rpartition("/")[2] in ("zarr.json", ".zarray", ".zgroup") for name in names):
        return "it is a Zarr array or group in a zip archive; unpack it into a directory first"
    arrays = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    if arrays:
        how = _saving("numpy.load(PATH)['NAME']", path)
        return f"it is an .npz archive with the arrays {listed(arrays)}; {how}, or unzip the archive"
    return "it is a zip archive; unpack it first"


def _tensors(file: IO[bytes], head: bytes) -> list[str] | None:
    """Return the names of the tensors in a safetensors file, or None if it is none."""
    size = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or size > _DESCRIPTION_LIMIT:
        return None
    file.seek(8)
    try:
        description = json.loads(file.read(size))
    except (ValueError, RecursionError):
        return None
    return [name for name in description if name != "__metadata__"]


def _is_text(head: bytes) -> bool:
    """Return whether some bytes are ASCII, as numbers in files are."""
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
