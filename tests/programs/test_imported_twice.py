"""Import the package a second time, as notebooks do that reload changed modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

#: Modules of the package, each with the package that it needs and a program that uses it.
USES = {
    "ascend_grad": (None, "assert np.allclose(ag.softmax(np.zeros(4)), 0.25)"),
    "ascend_grad.parallel": (
        None,
        """
from ascend_grad import parallel
assert parallel.linear_cross_entropy(np.zeros((2, 3)), np.zeros((4, 3)), np.array([1, 2]), comm=None).loss == np.log(4)
""",
    ),
    "ascend_grad.cli.main": (None, "assert importlib.import_module('ascend_grad.cli.main').main"),
    "ascend_grad.jax": (
        "jax",
        """
import jax
import ascend_grad.jax as agj
x = jax.numpy.zeros(4)
assert np.allclose(jax.jit(agj.softmax)(x), 0.25)
assert np.allclose(jax.grad(lambda x: agj.softmax(x)[0])(x)[0], 3 / 16)
""",
    ),
    "ascend_grad.dask": (
        "dask",
        """
import dask.array
import ascend_grad.dask as agd
assert np.allclose(agd.softmax(dask.array.zeros((2, 4))).compute(), 0.25)
""",
    ),
    "ascend_grad.torch": (
        "torch",
        """
import torch
import ascend_grad.torch as agt
x, target = torch.zeros(2, 4, requires_grad=True), torch.tensor([1, 2])
def loss(x):
    return agt.linear_cross_entropy(x, torch.eye(4), target) + agt.cross_entropy(agt.softmax(x), target)
(right,) = torch.autograd.grad(loss(x), x)
torch._dynamo.reset()
compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
assert torch.equal(torch.autograd.grad(compiled(x), x)[0], right)
assert torch.equal(torch.func.grad(loss)(x), right)
assert torch.equal(torch.vmap(agt.softmax)(x), torch.full((2, 4), 0.25))
""",
    ),
}

PROGRAM = """
import importlib, sys
import numpy as np

def use():
    import ascend_grad as ag
{use}

use()
for name in [name for name in sys.modules if name.split(".")[0] == "ascend_grad"]:
    del sys.modules[name]
use()
import {module}
for name in sorted(name for name in sys.modules if name.split(".")[0] == "ascend_grad"):
    if str(sys.modules[name].__file__).endswith(".py") and name != "ascend_grad.bench":
        importlib.reload(sys.modules[name])
use()
print("done")
"""


INSTALLED = [name for name, (package, _) in USES.items() if package is None or importlib.util.find_spec(package)]


@pytest.mark.parametrize("module", INSTALLED)
def test_use_after_a_second_import(module: str, run_script: Callable):
    use = USES[module][1]
    lines = "\n".join(f"    {line}" for line in use.strip().splitlines())
    assert run_script(PROGRAM.format(use=lines, module=module)).stdout == "done\n"
