"""Run the cases on tensors in each process of a group: ``python tensor_ranks.py FOLDER RANK SIZE``."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # the import precedes any group, which its default arguments would keep alive
from torch.fx.experimental.proxy_tensor import make_fx

import ascend_grad.torch as agt
from ascend_grad import parallel
from ascend_grad.torch.compat.cce import VocabParallelOptions

N, H, C = 9, 5, 13

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def problem(dtype: torch.dtype, reduction: str) -> Problem:
    """Make input, weight, targets and upstream gradient, equal in all processes. One of the targets is ignored."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, H, generator=generator).to(dtype) for shape in (N, C))
    target = torch.randint(0, C, (N,), generator=generator)
    target[4] = -100
    above = torch.randn((N,) if reduction == "none" else (), generator=generator)
    return x, w, target, above.to(dtype)


def names(size: int) -> list[tuple[torch.dtype, str]]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return [(dtype, reduction) for dtype in dtypes for reduction in ("mean", "sum", "none")]


def values(rank: int, size: int, dtype: torch.dtype, reduction: str) -> tuple[torch.Tensor, ...]:
    """Return the loss, and the gradients of two backward passes."""
    x, w, target, above = problem(dtype, reduction)
    start, stop = parallel.vocab_range(C, rank, size)
    x, w = x.requires_grad_(), w[start:stop].clone().requires_grad_()
    loss = agt.linear_cross_entropy(
        x, w, target, reduction=reduction, group=dist.group.WORLD, vocab_start_index=start, vocab_size=C
    )
    first = torch.autograd.grad(loss, (x, w), above, retain_graph=True)
    second = torch.autograd.grad(loss, (x, w), above)
    return loss.detach(), *first, *second


def frozen(rank: int, size: int, which: int) -> list[torch.Tensor | None]:
    """Return the gradients, with None for the input (``which`` 0) or the weight (1), which needs no gradient."""
    x, w, target, _ = problem(torch.float32, "mean")
    leaves = [x, w[slice(*parallel.vocab_range(C, rank, size))].clone()]
    leaves[1 - which].requires_grad_()
    agt.linear_cross_entropy(*leaves, target, group=dist.group.WORLD).backward()
    return [leaf.grad for leaf in leaves]


def one_row(rank: int, size: int) -> torch.Tensor:
    x, w, target, _ = problem(torch.float32, "mean")
    shard = w[slice(*parallel.vocab_range(C, rank, size))]
    return agt.linear_cross_entropy(x[0], shard, target[0], group=dist.group.WORLD)


def under_autocast(rank: int, size: int) -> torch.Tensor:
    x, w, target, _ = problem(torch.float32, "mean")
    shard = w[slice(*parallel.vocab_range(C, rank, size))]
    with torch.autocast("cpu", torch.bfloat16):
        return agt.linear_cross_entropy(x, shard, target, group=dist.group.WORLD)


def batched(rank: int, size: int, dtype: torch.dtype, reduction: str) -> tuple[torch.Tensor, ...]:
    """Return gradients for three upstream gradients at once."""
    x, w, target, above = problem(dtype, reduction)
    x, w = x.requires_grad_(), w[slice(*parallel.vocab_range(C, rank, size))].clone().requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target, reduction=reduction, group=dist.group.WORLD)
    several = torch.stack([factor * above for factor in (1.0, -2.0, 0.5)])
    return torch.autograd.grad(loss, (x, w), several, is_grads_batched=True)


#: Names of calls with options, with the arguments of `problem` that they are made of.
OPTIONS = [(name, reduction) for name in ("one target", "sparse targets") for reduction in ("mean", "none")]


def options(name: str) -> dict[str, Any]:
    """Return the options of a call in float64, for all classes."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)

    of_name = {"outputs": ("lse", "log_prob", "entropy", "predicted", "correct")}
    if name == "sparse targets":
        of_name = {"target_prob": numbers(N, 2), "outputs": ("entropy",)}
    return of_name | {
        "linear_bias": numbers(C), "weight": numbers(C), "token_weight": numbers(N), "label_smoothing": 0.2,
        "lse_square_scale": 0.1, "temperature": numbers(N), "logit_scale": 1.3, "softcap": 4.0
    }  # fmt: skip


def targets(name: str) -> torch.Tensor:
    target = problem(torch.float64, "mean")[2]
    return target if name == "one target" else torch.stack([target, target.flip(0)], 1)


def with_options(rank: int, size: int, name: str, reduction: str) -> tuple[Any, ...]:
    """Return the loss with its outputs, gradients of the loss, and gradients of the loss and the outputs."""
    x, w, _, above = problem(torch.float64, reduction)
    own = slice(*parallel.vocab_range(C, rank, size))
    given = options(name)
    given |= {each: given[each][own].clone() for each in ("linear_bias", "weight")}
    leaves = [x.requires_grad_(), w[own].clone().requires_grad_(), given["linear_bias"].requires_grad_()]
    found = agt.linear_cross_entropy(*leaves[:2], targets(name), reduction=reduction, group=dist.group.WORLD, **given)
    of_loss = torch.autograd.grad(found.loss, leaves, above, retain_graph=True)
    total = (found.loss * above).sum() + found.entropy.sum()
    if found.log_prob is not None:
        total = total + 2 * found.log_prob.sum() + 3 * found.lse.sum()
    return [None if each is None else each.detach() for each in found], of_loss, torch.autograd.grad(total, leaves)


def cut_cross_entropy_with_options(rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """Return the loss and lse of `compat.cce` with a bias and a cap, and the gradients of their sum."""
    x, w, target, _ = problem(torch.float64, "mean")
    start, stop = parallel.vocab_range(C, rank, size)
    x, w, bias = x.requires_grad_(), w[start:stop].clone().requires_grad_(), options("one target")["linear_bias"]
    bias = bias[start:stop].clone().requires_grad_()
    loss, lse = agt.compat.cce.linear_cross_entropy(
        x, w, target, bias, softcap=3.0, return_lse=True, vocab_parallel_options=VocabParallelOptions(start, stop)
    )
    return loss.detach(), lse.detach(), *torch.autograd.grad(loss + lse.sum(), (x, w, bias))


def cut_cross_entropy(rank: int, size: int, reduction: str, group: Any) -> tuple[torch.Tensor, ...]:
    """Return the loss of `compat.cce` with the options of a split vocabulary, and its gradients."""
    x, w, target, above = problem(torch.float64, reduction)
    start, stop = parallel.vocab_range(C, rank, size)
    x, w = x.requires_grad_(), w[start:stop].clone().requires_grad_()
    options = VocabParallelOptions(start, stop, group)
    loss = agt.compat.cce.linear_cross_entropy(
        x, w, target, reduction=reduction, impl="cce_exact", vocab_parallel_options=options
    )
    return loss.detach(), *torch.autograd.grad(loss, (x, w), above)


def failures(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return calls with bad arguments on the last process alone, and calls of transformations that are refused."""
    x, w, target, _ = problem(torch.float32, "mean")
    shard = w[slice(*parallel.vocab_range(C, rank, size))]
    is_last = rank == size - 1

    arguments, float8 = {"input": x, "linear_weight": shard, "target": target}, torch.float8_e4m3fn

    def call(**other: Any) -> Any:
        return agt.linear_cross_entropy(**arguments | (other if is_last else {}), group=dist.group.WORLD)

    start, stop = parallel.vocab_range(C, rank, size)

    def cce(reduce_e_grad: bool = True, stop: int = stop, **other: Any) -> Any:
        options = VocabParallelOptions(start, stop, reduce_e_grad=reduce_e_grad)
        return agt.compat.cce.linear_cross_entropy(x, shard, target, vocab_parallel_options=options, **other)

    def on_last(**other: Any) -> Callable[[], Any]:
        return partial(cce, **(other if is_last else {}))

    return {
        **{
            f"cce {name}": on_last(**{name: value})
            for name, value in (
                ("reduce_e_grad", False),
                ("stop", stop + 1),
                ("impl", "fast"),
                ("shift", N),
            )
        },
        "shape": partial(call, input=x[:, :2]),
        "several dimensions": partial(call, linear_weight=shard[:, None], target=target[:, None]),
        "dtype": partial(call, target=target.double()),
        "reduction": partial(call, reduction="average"),
        "bias": partial(call, linear_bias=torch.zeros(C)),
        "other dtype": partial(call, linear_weight=shard.half()),
        "no dtype of NumPy": partial(call, input=x.to(float8), linear_weight=shard.to(float8)),
        "other device": partial(call, **{name: tensor.to("meta") for name, tensor in arguments.items()}),
        "class weights": partial(call, weight=torch.ones(len(shard))),
        "needs gradients": partial(call, input=x.clone().requires_grad_()),
        "second order": lambda: second_order(x, shard, target, "mean"),
        "second order, computed in backward": lambda: second_order(x, shard, target, "none"),
        "make_fx": lambda: make_fx(lambda x: call(input=x))(x),
        "make_fx in one process": lambda: (make_fx(lambda x: call(input=x)) if is_last else lambda _: call())(x),
    }


def second_order(x: torch.Tensor, shard: torch.Tensor, target: torch.Tensor, reduction: str) -> Any:
    """Return the derivative of a gradient with respect to the upstream gradient."""
    x = x.clone().requires_grad_()
    loss = agt.linear_cross_entropy(x, shard, target, reduction=reduction, group=dist.group.WORLD)
    above = torch.ones_like(loss, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss, x, above, create_graph=True)
    return torch.autograd.grad(gradient.sum(), above if reduction == "none" else x)


def outcome(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or its exception without the traceback, which keeps the process group alive."""
    try:
        return work()
    except Exception as error:
        return pickle.loads(pickle.dumps(error))


def main(folder: str, rank: int, size: int) -> weakref.ref:
    """Run the cases and return the group, which nothing may keep alive."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = weakref.ref(dist.group.WORLD)
    outcomes: dict[Any, Any] = {key: outcome(partial(values, rank, size, *key)) for key in names(size)}
    for reduction in ("mean", "sum", "none"):
        for given in (None, dist.group.WORLD):
            key = "cce", reduction, given is None
            outcomes[key] = outcome(partial(cut_cross_entropy, rank, size, reduction, given))
    outcomes["frozen"] = [frozen(rank, size, which) for which in (0, 1)]
    outcomes["one row"] = one_row(rank, size)
    for key in names(size):
        outcomes["batched", *key] = batched(rank, size, *key)
    outcomes["autocast"] = under_autocast(rank, size)
    for case in OPTIONS:
        outcomes["options", *case] = outcome(partial(with_options, rank, size, *case))
    outcomes["cce with options"] = outcome(partial(cut_cross_entropy_with_options, rank, size))
    for name, work in failures(rank, size).items():
        outcomes[name] = outcome(work)
    torch.save(outcomes, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
    return group


if __name__ == "__main__":
    group = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    gc.collect()
    assert group() is None  # gloo's threads sometimes abort a process that ends while the group is alive
