"""Make random calls of the public operators, valid and invalid ones.

``python tests/support/fuzz.py [--calls COUNT] [--seed SEED]`` makes the calls.

Valid calls are computed by the CPU backend and by the reference. Both results have to be within the bounds of
`ascend_grad.bounds`. The CPU's result must have the bits of the same call on contiguous arrays and one thread. Both
backends have to refuse an invalid call with the same message. Exception and argument are as the contract demands.
Memory outside of the results must not change.

A call depends only on the seed and on its number. A failing call is printed with seed and number, and with the command
that repeats it: ``python tests/support/fuzz.py --seed SEED --call NUMBER``.
"""

from __future__ import annotations

import argparse
import collections
import gc
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fuzzed_sparse
import numpy as np
import producers
from faults import CODES, Fault
from fuzzed_arrays import LIBRARIES, NUMPY, Draw, shown
from fuzzed_calls import Sample, as_plain, expectation, in_its_library, random_sample, result_dtypes, result_names
from fuzzed_faults import broken
from fuzzed_losses import FULL_OUTPUTS
from samples import GUARD, assert_fresh, assert_identical, bytes_inside, native_copy

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.operators import table
from ascend_grad.sparse_arrays import is_sparse

#: Results of the shape of the logits whose rows lie side by side in memory.
WITH_ROWS_SIDE_BY_SIDE = (*FULL_OUTPUTS, "product")
#: The share of invalid calls.
FAULTY = 0.4
#: Number of failures after which a process ends.
MAX_FAILURES = 5


class Options(NamedTuple):
    seed: int
    libraries: tuple[str, ...]


class Made(NamedTuple):
    """Hold the arguments of a call, the sample that the call comes from, and its faults."""

    sample: Sample
    faults: list[Fault]
    arguments: dict[str, Any]


def make(options: Options, number: int) -> Made:
    """Draw the call with this number."""
    draw = Draw(f"{options.seed} {number}")
    sample = random_sample(draw, options.libraries)
    faults = broken(draw, sample) if draw.chance(FAULTY) else []
    return Made(sample, faults, in_its_library(draw, sample))


def variant_of(options: Options, number: int) -> str:
    """Choose a variant of the kernels that this machine has."""
    return Draw(f"variant {options.seed} {number}").choice(_cpu.supported_variants())


# ---- checks ----------------------------------------------------------------------------------------------------------


def contents(value: Any) -> list[bytes]:
    """Return the elements of all arrays in an argument."""
    if is_sparse(value):
        return fuzzed_sparse.parts_of(value)
    if isinstance(value, (tuple, list)):
        return [each for entry in value for each in contents(entry)]
    is_plain = isinstance(value, np.ndarray) and value.dtype != object
    return [np.asarray(value).tobytes()] if is_plain else []


def all_contents(sample: Sample) -> dict[str, list[bytes]]:
    """Return the elements of the arrays of a call, results included."""
    arrays = {name: contents(value) for name, value in sample.arguments.items()}
    return arrays if sample.sparse is None else arrays | {"sparse": contents(sample.sparse[0])}


def refusal(function: Callable, *args: Any, **arguments: Any) -> ag.AscendGradError:
    """Return the exception that the call has to raise."""
    try:
        function(*args, **arguments)
    except ag.AscendGradError as error:
        return error
    raise AssertionError(f"{function.__name__} took what is wrong")


def check_refused(made: Made) -> None:
    """Check that all backends, `explain` and `workspace_size` refuse the call alike, and that nothing is written."""
    sample, faults, arguments = made
    operator, fault = sample.operator, faults[0]
    before = all_contents(sample)
    backends = [{}] if "backend" in arguments else [{"backend": "cpu"}, {"backend": "reference"}]
    calls: list[tuple[Callable, tuple[str, ...], dict]] = [(getattr(ag, operator), (), how) for how in backends]
    if fault.stage != "structure":  # elements are read when the call is computed
        calls += [(ag.explain, (operator,), {}), (ag.workspace_size, (operator,), {})]
    messages = set()
    for function, names, how in calls:
        error = refusal(function, *names, **arguments, **how)
        assert type(error) is fault.raises, f"expected {fault.raises.__name__}, got {type(error).__name__}: {error}"
        assert error.code == CODES[fault.raises]
        messages.add(str(error))
    (message,) = messages
    assert message.startswith(f"{operator}: {fault.blamed}: expected "), f"expected {fault.blamed}, got {message}"
    assert all_contents(sample) == before, "a refused call has written something"


def results_of(sample: Sample, given: Any) -> tuple[Any, ...]:
    """Return the results of a call as a tuple of the operator's length."""
    results = given if isinstance(given, tuple) else (given,)
    assert len(results) == len(getattr(results, "_fields", table.OPERATORS[sample.operator].results))
    return results


def order_of(made: Made, i: int) -> np.ndarray | None:
    """Return the array whose axis order a new array for result i has; None for C order."""
    sample = made.sample
    operator = table.OPERATORS[sample.operator]
    if result_names(sample)[i] in WITH_ROWS_SIDE_BY_SIDE and sample.arrays["input"].ndim:
        axis, shape = int(sample.arguments.get("axis", -1)), sample.arrays["input"].shape
        return np.moveaxis(np.empty(np.moveaxis(np.empty(shape), axis, -1).shape), -1, axis)
    keeps_order = operator in table.ROWWISE or (operator.name, operator.results[i]) == (
        "cross_entropy",
        "input_grad",
    )
    name = operator.array_names[0]
    # A list has no axis order, whatever array it was made from.
    return sample.arrays.get(name) if keeps_order and not isinstance(made.arguments.get(name), list) else None


def plain_results(made: Made, results: tuple[Any, ...], *, fresh_checks: bool) -> tuple[np.ndarray | None, ...]:
    """Return results as NumPy's arrays. Check that `out` came back, and that new arrays are the library's own."""
    sample = made.sample
    outs = made.arguments.get("out")
    outs = (outs if sample.takes_pair else (outs,)) or ()
    first = table.OPERATORS[sample.operator].results.index(sample.result_of_out)
    arrays: list[np.ndarray | None] = []
    for i, (result, dtype) in enumerate(zip(results, result_dtypes(sample), strict=True)):
        number = i - first
        if 0 <= number < len(outs) and outs[number] is not None:
            assert result is outs[number], "out was not returned"
            place = sample.outs[number]
            assert place is not None
            arrays.append(place.array)
        elif result is None:
            arrays.append(None)
        else:
            if sample.library.owns is np.ndarray and np.isscalar(result):
                result = np.asarray(result)
            assert isinstance(result, sample.library.owns), f"a result is of class {type(result).__name__}"
            array = sample.library.array_of(result)
            assert array.dtype == dtype, f"a result has dtype {array.dtype}, expected {dtype}"
            if fresh_checks and sample.library is NUMPY:
                assert_fresh(array, array.shape, dtype, order_of(made, i))
            arrays.append(array)
    return tuple(arrays)


def check_untouched(sample: Sample) -> None:
    """Check that no argument and no byte around the results was modified."""
    places = [place for place in sample.outs if place is not None]
    if sample.sparse is not None:
        assert contents(sample.sparse[0]) == sample.parts, "the sparse input was modified"
    for name, array in sample.arrays.items():
        if not any(np.may_share_memory(array, place.array) for place in places):
            assert native_copy(array).tobytes() == sample.values[name].tobytes(), f"{name} was modified"
    for place in places:
        inside = bytes_inside(place.array, place.memory)
        if place.shared is not None:
            inside |= bytes_inside(sample.arguments[place.shared], place.memory)
        assert np.all(place.memory[~inside] == GUARD), "bytes outside of the results were written"


def check_computed(options: Options, number: int, made: Made) -> None:
    """Check the results of both backends, and that neither layout nor threads change a bit."""
    function = getattr(ag, made.sample.operator)
    within_bounds = expectation(made.sample)
    results = plain_results(made, results_of(made.sample, function(**made.arguments, backend="cpu")), fresh_checks=True)
    check_untouched(made.sample)
    within_bounds(results, "cpu")
    plain = results_of(made.sample, function(**as_plain(made.sample), backend="cpu"))
    for result, same in zip(results, plain, strict=True):
        if result is not None:
            assert_identical(result, np.asarray(same))
    # Results may overwrite arguments, but without `out` nothing was modified.
    again = make(options, number) if made.sample.outs else made
    assert ag.workspace_size(made.sample.operator, **again.arguments) >= 0
    given = results_of(again.sample, function(**again.arguments, backend="reference"))
    right = plain_results(again, given, fresh_checks=False)
    check_untouched(again.sample)
    within_bounds(right, "reference")
    for result, same in zip(results, right, strict=True):
        assert (result is None) == (same is None)
        if result is not None and same is not None:
            assert (result.dtype, result.shape) == (same.dtype, same.shape)


def check(options: Options, number: int) -> Made:
    """Make the call with this number, and check its outcome."""
    made = make(options, number)
    if made.faults:
        check_refused(made)
    else:
        check_computed(options, number, made)
    return made


# ---- runs ------------------------------------------------------------------------------------------------------------


def repeating(options: Options, number: int) -> str:
    """Return the command that makes only this call."""
    return f"python tests/support/fuzz.py --arrays {','.join(options.libraries)} --seed {options.seed} --call {number}"


def described(options: Options, number: int) -> str:
    """Describe the call: its operator, faults and arguments."""
    made = make(options, number)
    lines = [f"{made.sample.operator} on {variant_of(options, number)}, arrays of {made.sample.library.name}"]
    lines += [f"  to be refused for {fault.stage}: {fault}" for fault in made.faults]
    lines += [f"  {name} = {shown(value)}" for name, value in made.arguments.items()]
    return "\n".join(lines)


def report(options: Options, number: int) -> str:
    """Return the report of a call that has just failed."""
    failure = traceback.format_exc()
    try:
        words = described(options, number)
    except Exception:
        words = "it cannot even be made"
    return f"\n=== seed {options.seed}, call {number} failed: {repeating(options, number)}\n{words}\n{failure}"


def run_calls(options: Options, numbers: range, current: Any, counts: collections.Counter, *, variants: bool) -> int:
    """Make these calls, and return the number of failures. `current` receives the number of the current call."""
    failures = 0
    for number in numbers:
        current.value = number
        try:
            if variants:
                _cpu.force_variant(variant_of(options, number))
            made = check(options, number)
            counts[made.sample.operator, bool(made.faults)] += 1
        except Exception:
            print(report(options, number), flush=True)
            failures += 1
            if failures == MAX_FAILURES:
                break
    return failures


def run_process(options: Options, parts: list[range], currents: list[Any], totals: Any) -> None:
    """Make the calls of one process, in as many threads as there are parts."""
    counts = [collections.Counter[tuple[str, bool]]() for _ in parts]
    failures = [0] * len(parts)

    def work(i: int) -> None:
        failures[i] = run_calls(options, parts[i], currents[i], counts[i], variants=len(parts) == 1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, len(parts))]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    gc.collect()  # the collection frees objects in the tracebacks of failures
    if producers.live or producers.wrongly_deleted:
        print(f"handed out and not deleted: {len(producers.live)}; wrongly deleted: {producers.wrongly_deleted}")
        failures[0] += 1
    totals.put(sum(counts, collections.Counter()))
    sys.exit(1 if any(failures) else 0)


def interleaved(calls: int, parts: int) -> Iterator[range]:
    return (range(i, calls, parts) for i in range(parts))


def run(options: Options, calls: int, processes: int, threads: int) -> int:
    """Make the calls 0 to `calls` - 1. If a process ends by a signal, report its current calls."""
    # Waiting threads must not spin, since they would keep other processes from the cores.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    context = multiprocessing.get_context("spawn")
    totals = context.SimpleQueue()
    parts = list(interleaved(calls, processes * threads))
    started = []
    for i in range(processes):
        currents = [context.Value("q", -1, lock=False) for _ in range(threads)]
        process = context.Process(target=run_process, args=(options, parts[i::processes], currents, totals))
        process.start()
        started.append((process, currents))
    failed = 0
    for process, currents in started:
        process.join()
        failed += process.exitcode != 0
        if process.exitcode not in (0, 1):
            print(f"\n=== a process ended with {process.exitcode}; it was at")
            for current in currents:
                print(f"  {repeating(options, current.value)}")
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    while not totals.empty():
        counts += totals.get()
    for operator in table.OPERATORS:
        print(f"{operator:40}{counts[operator, False]:10} computed{counts[operator, True]:10} refused")
    print(f"{sum(counts.values())} calls of seed {options.seed} are as they have to be")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="make this one call alone, and tell what it is")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="Python threads of each process (default: %(default)s)")
    parser.add_argument(
        "--arrays", default="numpy,dlpack", help=f"whose, of {', '.join(LIBRARIES)} (default: %(default)s)"
    )
    given = parser.parse_args()
    options = Options(given.seed, tuple(given.arrays.split(",")))
    if given.call is None:
        return min(run(options, given.calls, given.processes, given.threads), 1)
    print(described(options, given.call), flush=True)
    _cpu.force_variant(variant_of(options, given.call))
    check(options, given.call)
    print("it is as it has to be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
