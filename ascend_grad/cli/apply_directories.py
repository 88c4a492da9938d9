"""Row-wise operators on directories of .npy files, each of which is an array of its own."""

from __future__ import annotations

import os
from time import perf_counter

from ..errors import AscendGradError
from .apply_files import write_rowwise
from .apply_job import Job, storage_of
from .errors import CommandError
from .new_directories import Piece, fill_directory
from .npy_files import MappedArray, Source, open_array, parse_source


def run(job: Job) -> None:
    """Write a directory with a result for each file of the input's, of the same name, and a line to stdout."""
    path = job.result_path()
    folders = {name: source for name, source in job.sources.items() if storage_of(source) == "directory"}
    files = _common_files(list(folders.values()))
    temporary = job.temporary or os.path.dirname(os.path.realpath(path))
    served_by_one = {
        name: open_array(parse_source(source), job.raw_dtype, temporary, job.bar)
        for name, source in job.sources.items()
        if name not in folders
    }

    def opened(file: str) -> dict[str, MappedArray]:
        return {
            name: open_array(Source(os.path.join(source, file), None), job.raw_dtype, temporary, job.bar)
            if name in folders
            else served_by_one[name]
            for name, source in job.sources.items()
        }

    pieces, backends, dtypes = {}, set(), []
    for file in files:  # all of them, before anything is written
        arrays = {name: mapped.array for name, mapped in opened(file).items()}
        try:
            call, backend = job.validated(arrays)
        except AscendGradError as error:
            raise CommandError(f"{file}: {error}") from error
        backends.add(backend)
        dtypes += [array.dtype for array in arrays.values()]
        sources = [
            os.path.join(source, file) if name in folders else parse_source(source).path
            for name, source in job.sources.items()
        ]
        itemsize = (job.out_dtype or arrays[next(iter(arrays))].dtype).itemsize
        pieces[file] = Piece(sources, [file], itemsize * call.arrays[0].size)
    job.check_raw_dtype(dtypes)

    start = perf_counter()
    with job.bar(desc=job.operator.name, total=sum(piece.nbytes for piece in pieces.values())) as progress:

        def compute(directory: str, file: str) -> None:
            inputs = opened(file)
            call, backend = job.validated({name: mapped.array for name, mapped in inputs.items()})
            write_rowwise(job, call, backend, list(inputs.values()), os.path.join(directory, file), progress)

        computed = fill_directory(path, job.description(), pieces, lambda directory: None, compute, progress)
    print(
        f"{path}: {len(files)} arrays, {computed} of them computed and written in {perf_counter() - start:.2f} s "
        f"(backend {', '.join(sorted(backends))})"
    )


def _common_files(folders: list[str]) -> list[str]:
    """The names of the .npy files, which are the same in all of the directories."""
    listings = [
        sorted(name for name in os.listdir(folder) if name.endswith(".npy") and not name.startswith("."))
        for folder in folders
    ]
    first = listings[0]
    if not first:
        raise CommandError(f"{folders[0]}: no .npy file in this directory")
    for folder, listing in zip(folders, listings):
        different = sorted(set(first) ^ set(listing))
        if different:
            here = folders[0] if different[0] in first else folder
            raise CommandError(f"{folder}: expected the files that {folders[0]} has; {different[0]} is in {here} alone")
    return first
