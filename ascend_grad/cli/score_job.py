"""The calls that a command line of ``ascend-grad score`` asks for, for files of any format."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._call import ResultSpec
from .._target_checks import looks_one_hot
from .._version import __version__
from ..inspection import bound_call
from .errors import CommandError, naming_inputs
from .npy_files import check_raw_dtype, open_array
from .zarr_inputs import ZarrInput, is_zarr, require_packages

if TYPE_CHECKING:
    from tqdm import tqdm

#: Bytes of HIDDEN in a chunk of rows: little memory, and much work compared with reading the weight once more.
CHUNK_BYTES = 2**26
#: Least number of rows in a chunk: with fewer, reading the weight would take much of the time.
CHUNK_ROWS = 2**10

#: Bytes that a row counts for at least. Each row has several results of up to 8 bytes.
_LEAST_ROW_BYTES = 64
#: Bytes of an entry of both results of the top-k call.
_TOP_K_BYTES = 16
#: Prefix of the names of the results of the top-k call.
_TOP_K = "top_k_"


@dataclass(frozen=True)
class ScoreJob:
    """The inputs, results and settings of a command line."""

    #: The paths of the inputs.
    hidden: str
    weight: str
    targets: str | None
    #: The path of each requested result, by its name. Results of the top-k call have names with the prefix "top_k_".
    results: dict[str, str]
    top_k: int | None
    ignore_index: int
    #: The path of the layer's bias.
    bias: str | None
    logit_scale: float
    softcap: float | None
    temperature: float
    workspace_bytes: int | None
    backend: str | None
    num_threads: int | None
    #: The dtype of elements of two raw bytes, or of integers of two bytes in place of floating-point numbers.
    raw_dtype: np.dtype | None
    #: Makes a progress bar.
    bar: Callable[..., tqdm]

    @property
    def sources(self) -> list[str]:
        """Return the paths of the inputs."""
        return [path for path in (self.hidden, self.weight, self.targets, self.bias) if path is not None]

    def description(self, result: str) -> dict[str, Any]:
        """Return all that decides on a result except the contents of the sources and K, as JSON takes it."""
        targets = None if is_of_top_k(result) else self.targets
        return {
            "version": __version__,
            "command": "score",
            "result": result,
            "hidden": os.path.realpath(self.hidden),
            "weight": os.path.realpath(self.weight),
            "targets": None if targets is None else os.path.realpath(targets),
            "ignore-index": None if targets is None else self.ignore_index,
            "bias": None if self.bias is None else os.path.realpath(self.bias),
            "logit-scale": self.logit_scale,
            "softcap": self.softcap,
            "temperature": self.temperature,
            "workspace-bytes": self.workspace_bytes,
            "backend": self.backend,
            "dtype": None if self.raw_dtype is None else str(self.raw_dtype),
        }


class WholeInput(NamedTuple):
    """An input that is used as a whole."""

    array: NDArray
    #: What changes if its files do.
    state: str


def whole_input(path: str, raw_dtype: np.dtype | None) -> WholeInput:
    """Read a Zarr array or a ``.npy`` file, which is mapped if it is large."""
    if is_zarr(path):
        require_packages(path)
        source = ZarrInput(path, raw_dtype)
        state = source.state()
        return WholeInput(source[tuple(slice(0, length) for length in source.shape)], state)
    with open_array(path, raw_dtype) as file:
        status = os.stat(path)
        return WholeInput(file.read(file.whole), f"{status.st_size} {status.st_mtime_ns}")


class Scorer:
    """Compute results of chunks of rows, after checks of the whole call.

    Parameters
    ----------
    job : ScoreJob
        What to compute.
    hidden : ndarray
        HIDDEN, or an array of its shape and dtype: its elements are not read.

    Raises
    ------
    CommandError
        An input cannot be used.
    AscendGradError
        A setting cannot be used.
    """

    def __init__(self, job: ScoreJob, hidden: NDArray):
        self._job = job
        if hidden.ndim != 2:
            raise CommandError(f"{job.hidden}: expected shape (N, H), got {hidden.shape}")
        self.weight = whole_input(job.weight, job.raw_dtype)
        self.targets = None if job.targets is None else whole_input(job.targets, None)
        self.bias = None if job.bias is None else whole_input(job.bias, job.raw_dtype)
        dtypes = {job.hidden: hidden.dtype, job.weight: self.weight.array.dtype}
        if job.bias is not None and self.bias is not None:
            dtypes[job.bias] = self.bias.array.dtype
        check_raw_dtype(job.raw_dtype, dtypes)
        self.target = self._target_ids(hidden.shape[:1])
        #: The results that are computed, with their shapes and dtypes, and the backend of each.
        self.specs: dict[str, ResultSpec] = {}
        self.backends: dict[str, str] = {}
        names = [name for name in job.results if not is_of_top_k(name)]
        if self.targets is not None and "log_prob" not in names:
            names.append("log_prob")  # for the mean of all rows
        if names:
            arrays = (hidden, self.weight.array, self.target)
            self._check("linear_cross_entropy", arrays, self._loss_settings(names), {name: name for name in names})
        names = [name for name in job.results if is_of_top_k(name)]
        if names:
            arguments = (hidden, self.weight.array, job.top_k)
            self._check("linear_top_k", arguments, self._settings(), {name: _of_top_k(name) for name in names})

    def compute(self, hidden: Any, target: Any, names: Collection[str], functions: Any = ag) -> dict[str, Any]:
        """Return results of some rows of HIDDEN and their targets, by the operators of a module."""
        values: dict[str, Any] = {}
        losses = [name for name in names if not is_of_top_k(name)]
        if losses:
            settings = self._loss_settings(losses) | {"backend": self.backends[losses[0]]}
            result = functions.linear_cross_entropy(hidden, self.weight.array, target, **settings)
            values |= {name: getattr(result, name) for name in losses}
        entries = [name for name in names if is_of_top_k(name)]
        if entries:
            assert self._job.top_k is not None
            settings = self._settings() | {"backend": self.backends[entries[0]]}
            top = functions.linear_top_k(hidden, self.weight.array, self._job.top_k, **settings)
            values |= {name: getattr(top, _of_top_k(name)) for name in entries}
        return values

    def states(self, name: str) -> list[str]:
        """Return the states of the inputs that every row of a result depends on."""
        targets = None if is_of_top_k(name) else self.targets
        return [each.state for each in (self.weight, self.bias, targets) if each is not None]

    def scored(self, start: int, stop: int) -> NDArray:
        """Return which rows of a range have a target that is not ignored."""
        return self.target[start:stop] != self._job.ignore_index

    def _target_ids(self, shape: tuple[int, ...]) -> NDArray:
        """Return the targets in a dtype that the library takes; without targets, entry 0 for each row."""
        if self.targets is None:
            if self.weight.array.shape[:1] == (0,) and shape != (0,):
                raise CommandError(f"{self._job.weight}: expected at least one row, got none")
            return np.broadcast_to(np.int64(0), shape)
        ids = self.targets.array
        classes = self.weight.array.shape[:1]
        if ids.dtype.kind not in "iu":
            may_be_dense = ids.shape == shape + classes
            advice = f"{'argmax(-1)' if may_be_dense else 'astype(numpy.int64)'} converts it to ids"
            got = f"{ids.dtype} of shape {ids.shape}; {advice}"
            raise CommandError(f"{self._job.targets}: expected ids of an integer dtype, got {got}")
        if ids.ndim == 2 and classes and looks_one_hot(ids, classes[0]):
            one_hot = f"{ids.shape} looks one-hot (all ids are 0 or 1, as many as classes)"
            raise CommandError(f"{self._job.targets}: {one_hot}; argmax(-1) converts it to ids")
        if ids.dtype.itemsize == 8:
            return ids
        return ids.astype(np.promote_types(ids.dtype, np.int32), copy=False)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments that all calls have but for their rows and the weight."""
        job = self._job
        return {
            "bias": None if self.bias is None else self.bias.array,
            "logit_scale": job.logit_scale,
            "softcap": job.softcap,
            "temperature": job.temperature,
            "workspace_bytes": job.workspace_bytes,
            "backend": job.backend,
            "num_threads": job.num_threads,
        }

    def _loss_settings(self, names: list[str]) -> dict[str, Any]:
        """Return the arguments of the loss but for its rows and the weight."""
        loss = {"reduction": "none", "return_grad": False, "ignore_index": self._job.ignore_index}
        if self.target.ndim == 2:
            loss["target_prob"] = 0
        return self._settings() | loss | {"outputs": tuple(names)}

    def _check(self, operator: str, arguments: tuple, settings: dict[str, Any], results: dict[str, str]) -> None:
        """Check a call on all rows, and record specification and backend of its results.

        `results` has the operator's name of each result. Errors of an input name its file.
        """
        job = self._job
        paths = {"input": job.hidden, "weight": job.weight, "target": job.targets, "bias": job.bias}
        with naming_inputs(operator, paths):
            call, _, choice = bound_call(operator, arguments, settings)
        specs = dict(zip(call.operator.results, call.specs))
        for name, result in results.items():
            spec = specs[result]
            assert spec is not None
            self.specs[name], self.backends[name] = spec, choice.backend


def is_of_top_k(name: str) -> bool:
    """Return whether a result is one of the top-k call."""
    return name.startswith(_TOP_K)


def chunk_rows(hidden: NDArray, top_k: int | None, multiple: int = 1) -> int:
    """Return the number of rows of a chunk, a multiple of a number; one chunk has all rows if they are few."""
    count, width = hidden.shape
    row_bytes = max(width * hidden.dtype.itemsize, (top_k or 0) * _TOP_K_BYTES, _LEAST_ROW_BYTES)
    wanted = max(CHUNK_ROWS, CHUNK_BYTES // row_bytes)
    return multiple * max(1, min(wanted // multiple, -(-count // multiple)))


class Likelihood:
    """Sum log-probabilities of scored tokens."""

    def __init__(self) -> None:
        self._count, self._total = 0, 0.0

    def add(self, log_prob: NDArray, scored: NDArray) -> None:
        """Add the log-probabilities of some rows, of which `scored` are not ignored."""
        self._count += int(np.count_nonzero(scored))
        self._total += float(np.sum(log_prob[scored], dtype=np.float64))

    def describe(self, path: str) -> str:
        """Return the line about the targets in a file."""
        if not self._count:
            return f"{path}: 0 tokens scored"
        mean = -self._total / self._count
        with np.errstate(over="ignore"):
            perplexity = np.exp(mean)
        return (
            f"{path}: {self._count} tokens scored, mean negative log-likelihood {mean:.6g}, perplexity {perplexity:.6g}"
        )


def _of_top_k(name: str) -> str:
    """Return the name of a result in the results of `linear_top_k`."""
    return name.removeprefix(_TOP_K)
