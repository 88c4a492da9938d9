"""Run the cases in each process of a group on Ascend NPUs. `hccl_fork` forks the process and calls `run`.

``HOME`` is an installation of the test double of a device. ``BACKEND`` is "hccl", "both" or "gloo". If ``WHAT`` is
"arrays", each process has a separate device. If it is "tensors", the cases use autograd, on device 0 in each process.
"""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import hccl_stand_in
import tensor_ranks
import torch
import torch.distributed as dist
import torch.distributed.nn  # the import precedes any group, which its default arguments would keep alive
import torch_npu_real
import torch_npu_stand_in
from linear_samples import LinearProblem
from parallel_samples import tokens_rank, vocabulary_rank, whole
from stand_in import StandIn

import ascend_grad.torch as agt
from ascend_grad import npu, parallel
from ascend_grad.backends.ascend import runtime, session
from ascend_grad.errors import device_error

SHAPE, ENTRIES, ROWS = (33, 50, 17), [0, 20, 50], [0, 20, 33]
#: A shape whose matrices are larger than any other array that a call copies.
LARGE, LARGE_ENTRIES, LARGE_ROWS = (64, 96, 1024), [0, 40, 96], [0, 30, 64]

REDUCTIONS = ("mean", "sum", "none")
#: Functions whose calls fail, one call in each attempt, with the number of calls.
FAULTS = {"aclrtMemcpyAsync": 19, "aclnnFusedLinearCrossEntropyLossGrad": 1, "wait_for_torch": 19}
BACKENDS = ("hccl", "both", "gloo")

Outcomes = dict[Any, Any]


# ---- arrays ----------------------------------------------------------------------------------------------------------


def array_cases(backend: str) -> dict[str, tuple]:
    """Return problem, call, cuts and options by name. Arrays are on the device ("there") or on the host ("here")."""
    cases: dict[str, tuple] = {}
    dtypes = {"there": ("float16", "bfloat16"), "here": ("float16", "bfloat16", "float32", "float64")}
    for place in ("there",) if backend == "hccl" else ("there", "here"):
        for dtype in dtypes[place]:
            for deterministic in (False, True):
                here = {"backend": "cpu"} if place == "here" else {"put": npu.asarray}
                options = {"deterministic": deterministic, **here}
                for share in (True, False, "scatter"):
                    key = f"vocabulary {place} {dtype} {share} {deterministic}"
                    problem = whole(SHAPE, dtype, reduction="none" if deterministic else "mean")
                    cases[key] = problem, vocabulary_rank, ENTRIES, options | {"reduce_input_grad": share}
                for share in (True, "scatter"):
                    key = f"tokens {place} {dtype} {share} {deterministic}"
                    problem = whole(SHAPE, dtype, reduction="none" if deterministic else "mean")
                    cases[key] = problem, tokens_rank, ROWS, options | {"reduce_weight_grad": share}
    there = {"put": npu.asarray}
    for place in ("there",) if backend == "hccl" else ("there", "here"):
        for name, shape in (("one token", (1, 12, 5)), ("no features", (6, 12, 0))):
            for share in (True, "scatter"):
                options = {"reduce_input_grad": share, "deterministic": True}
                options |= there if place == "there" else {"backend": "cpu"}
                key = f"vocabulary {place}, {name} {share}"
                cases[key] = whole(shape, "float16"), vocabulary_rank, [0, 5, 12], options
    cases["vocabulary there, a rank without entries"] = whole(SHAPE, "float16"), vocabulary_rank, [0, 0, 50], there
    cases["tokens there, a rank without tokens"] = whole(SHAPE, "float16"), tokens_rank, [0, 33, 33], there
    return cases


def parts_there(problem: LinearProblem, work: Callable, own: slice) -> list[npu.DeviceArray]:
    """Return the arrays of a rank, with its vocabulary entries or its tokens, on the device."""
    x, w, target = (problem.arguments[name] for name in ("input", "weight", "target"))
    parts = (x, w[own], target) if work is parallel.linear_cross_entropy else (x[own], w, target[own])
    return [npu.asarray(each) for each in parts]


def copied(rank: int, work: Callable, cuts: list[int]) -> int:
    """Return the number of elements of the largest array that the library copies from or to the host in a call."""
    sizes: list[int] = []
    put, fetch = session.Session.put, session.Session.fetch

    def counted_put(self: session.Session, array: Any, *arguments: Any, **more: Any) -> npu.DeviceArray:
        if not isinstance(array, npu.DeviceArray):
            sizes.append(array.size)
        return put(self, array, *arguments, **more)

    def counted_fetch(self: session.Session, pairs: Any) -> None:
        pairs = list(pairs)
        sizes.extend(array.size for array, _ in pairs)
        fetch(self, pairs)

    there = parts_there(whole(LARGE, "float16"), work, slice(cuts[rank], cuts[rank + 1]))
    session.Session.put, session.Session.fetch = counted_put, counted_fetch
    try:
        results = work(*there, comm=dist.group.WORLD, ignore_index=-7)
    finally:
        session.Session.put, session.Session.fetch = put, fetch
    assert all(isinstance(each, npu.DeviceArray) for each in results)
    if not torch_npu_real.IS_INSTALLED:
        assert not torch.npu.current_stream(rank).queue  # an empty queue shows that all work is submitted
    return max(sizes)


def another_device(rank: int) -> None:
    """Call the function with arrays on a device that is not torch's current one."""
    there = parts_there(whole((9, 20, 4), "float16"), parallel.linear_cross_entropy, slice(10 * rank, 10 * rank + 10))
    npu.set_device(1 - rank)
    try:
        others = [npu.asarray(each.numpy()) for each in there]
        parallel.linear_cross_entropy(*others, comm=dist.group.WORLD, ignore_index=-7)
    finally:
        npu.set_device(rank)


def failures(device: StandIn, backend: str, rank: int) -> dict[Any, Callable[[], Any]]:
    """Return calls in which rank 1 alone fails, and a good call after them."""
    problem = whole((9, 20, 4), "float16")
    entries = partial(vocabulary_rank, problem, [0, 11, 20], dist.group.WORLD)
    tokens = partial(tokens_rank, problem, [0, 5, 9], dist.group.WORLD)

    def fault(work: Callable, own: slice, function: str, nth: int) -> None:
        there = parts_there(problem, work, own)
        original, calls = runtime.wait_for_torch, count(1)

        def wait(device: int) -> None:
            if next(calls) == nth:
                raise device_error(507015, "aclrtSynchronizeStream")
            original(device)

        if rank and function == "wait_for_torch":
            runtime.wait_for_torch = wait
        elif rank:
            device.fail(function, nth)
        try:
            work(*there, comm=dist.group.WORLD, ignore_index=-7)
        finally:
            device.reset()
            runtime.wait_for_torch = original

    cases: dict[Any, Callable[[], Any]] = {
        "bad argument": partial(entries, put=npu.asarray, **({"filter_eps": -1.0} if rank else {})),
        "memory": partial(entries, put=npu.asarray if rank else None),
        "host": entries,
        "host, tokens": tokens,
        "dtype": partial(vocabulary_rank, whole((9, 20, 4), "float32"), [0, 11, 20], dist.group.WORLD, put=npu.asarray),
    }
    if backend != "both":  # if there are both backends, the double uses a single device
        cases["another device"] = partial(another_device, rank)
    own_entries, own_tokens = slice(11 * rank, 11 + 9 * rank), slice(5 * rank, 5 + 4 * rank)
    for work, own in (
        (parallel.linear_cross_entropy, own_entries),
        (parallel.data_parallel_linear_cross_entropy, own_tokens),
    ):
        for function, most in FAULTS.items():
            for nth in range(1, most + 1):
                cases[work.__name__, function, nth] = partial(fault, work, own, function, nth)
    return cases | {"afterwards": partial(entries, put=npu.asarray)}


def arrays(device: StandIn, backend: str, rank: int) -> Outcomes:
    outcomes: Outcomes = {}
    for name, (problem, work, cuts, options) in array_cases(backend).items():
        outcomes[name] = tensor_ranks.outcome(partial(work, problem, cuts, dist.group.WORLD, **options))
    outcomes["copied"] = [
        copied(rank, parallel.linear_cross_entropy, LARGE_ENTRIES),
        copied(rank, parallel.data_parallel_linear_cross_entropy, LARGE_ROWS),
    ]
    for name, case in failures(device, backend, rank).items():
        outcomes[name] = tensor_ranks.outcome(case)
    return outcomes


# ---- tensors ---------------------------------------------------------------------------------------------------------


def parts(rank: int, dtype: torch.dtype, reduction: str) -> tuple[torch.Tensor, ...]:
    """Make input, weight, targets and the upstream gradient of this rank on device 0."""
    x, w, target, above = tensor_ranks.problem(dtype, reduction)
    return tuple(each.to("npu:0") for each in (x, w[slice(*parallel.vocab_range(len(w), rank, 2))], target, above))


def values(rank: int, dtype: torch.dtype, reduction: str) -> list[torch.Tensor]:
    """Return the loss, and the gradients of two backward passes."""
    x, w, target, above = parts(rank, dtype, reduction)
    x, w = x.requires_grad_(), w.requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target, reduction=reduction, group=dist.group.WORLD)
    assert loss.device == x.device
    first = torch.autograd.grad(loss, (x, w), above, retain_graph=True)
    second = torch.autograd.grad(loss, (x, w), above)
    return [each.detach().cpu() for each in (loss, *first, *second)]


def frozen(rank: int, which: int) -> list[torch.Tensor | None]:
    """Return the gradients, with None for the input (``which`` 0) or the weight (1), which needs no gradient."""
    *leaves, target, _ = parts(rank, torch.bfloat16, "mean")
    leaves[1 - which].requires_grad_()
    agt.linear_cross_entropy(*leaves, target, group=dist.group.WORLD).backward()
    return [None if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]


def losses(rank: int) -> list[torch.Tensor]:
    """Compute a loss without gradients, a loss of one row, and a loss of float32 tensors under autocast."""
    x, w, target, _ = parts(rank, torch.bfloat16, "mean")
    call = partial(agt.linear_cross_entropy, group=dist.group.WORLD)
    with torch.no_grad():
        found = [call(x.requires_grad_(), w, target), call(x[0], w, target[0])]
    x, w, target, _ = parts(rank, torch.float32, "mean")
    with torch.autocast("npu", torch.bfloat16):
        found.append(call(x, w, target))
    return [each.cpu() for each in found]


def option_values() -> tuple[torch.Tensor, ...]:
    """Return class weights, token weights, and upstream gradients of two outputs, in float32."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.rand(count, generator=generator) for count in (tensor_ranks.C, *[tensor_ranks.N] * 3))


def with_options(rank: int) -> list[torch.Tensor]:
    """Return a loss with its outputs, and the gradients of all of them."""
    x, w, target, _ = parts(rank, torch.bfloat16, "mean")
    classes, tokens, of_lse, of_log_prob = (each.to(x.device) for each in option_values())
    own = slice(*parallel.vocab_range(tensor_ranks.C, rank, 2))
    x, w = x.requires_grad_(), w.requires_grad_()
    found = agt.linear_cross_entropy(
        x, w, target, weight=classes[own].clone(), token_weight=tokens, outputs=("log_prob", "lse"),
        group=dist.group.WORLD,
    )  # fmt: skip
    total = found.loss + (found.lse * of_lse).sum() + (found.log_prob * of_log_prob).sum()
    gradients = torch.autograd.grad(total, (x, w))
    return [each.detach().cpu() for each in (found.loss, found.lse, found.log_prob, *gradients)]


def refused(rank: int) -> None:
    x, w, target, _ = parts(rank, torch.float32, "mean")
    agt.linear_cross_entropy(x, w, target, group=dist.group.WORLD)


def tensors(rank: int) -> Outcomes:
    cases: dict[Any, Callable[[], Any]] = {
        (dtype, reduction): partial(values, rank, dtype, reduction)
        for dtype in (torch.float16, torch.bfloat16)
        for reduction in REDUCTIONS
    }
    cases |= {("frozen", which): partial(frozen, rank, which) for which in (0, 1)}
    cases |= {
        "losses": partial(losses, rank),
        "options": partial(with_options, rank),
        "refused": partial(refused, rank),
    }
    return {name: tensor_ranks.outcome(case) for name, case in cases.items()}


def main(folder: str, home: str, backend: str, what: str, rank: int) -> weakref.ref:
    """Run the cases and return the group, which nothing may keep alive."""
    device = StandIn(Path(home))
    assert (npu.device_count(), npu.get_device()) == (2, rank)
    double = None if torch_npu_real.IS_INSTALLED else torch_npu_stand_in.register()
    if double is not None:
        double.bind(Path(home))
        sys.modules["torch_npu"] = double
    torch.npu.set_device(rank if what == "arrays" else 0)
    hccl_stand_in.register()
    engine = backend if backend == "gloo" else f"{backend}_stand_in"
    dist.init_process_group(engine, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = weakref.ref(dist.group.WORLD)

    outcomes = arrays(device, backend, rank) if what == "arrays" else tensors(rank)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))

    dist.destroy_process_group()
    gc.collect()
    assert session.release_all()  # autograd's threads have separate sessions
    assert device.violations() == [], device.violations()
    if double is not None:  # the real torch_npu does not destroy its streams
        double.release()
        assert device.live() == {}, device.live()
    return group


def run(folder: str, home: str, backend: str, what: str, rank: int) -> None:
    group = main(folder, home, backend, what, rank)
    gc.collect()
    assert group() is None  # gloo's threads sometimes abort a process that ends while the group is alive
