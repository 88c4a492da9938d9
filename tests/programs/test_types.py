"""Check programs with mypy, which knows the library's types only from its annotations, as a user's mypy does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ascend_grad as ag

#: Types of other libraries are not read, which would take half a minute: their classes are Any. A union with one of
#: this library's classes is still not Any.
CONFIGURATION = """
[mypy]
follow_imports = silent
strict_equality = true
""" + "".join(
    f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    for name in ("dask", "jax", "ml_dtypes", "mpi4py", "torch")
)

#: A line with an error ends with a comment that names mypy's error code.
PROGRAMS = {
    "numpy": """
import numpy as np
from numpy.typing import NDArray
import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad import LossResult

x, w, t = np.zeros((2, 3)), np.zeros((4, 3)), np.array([0, 3])
found = ag.cross_entropy(x, t, outputs=("lse", "entropy"))
assert_type(found, LossResult[NDArray])
assert_type(found.loss, NDArray)
(found.input_grad * found.lse[:, None] + found.entropy.sum()).mean()
layer = ag.linear_cross_entropy(x, w, t, bias=np.zeros(4), output_mask=(True, False))
assert_type(layer, LossResult[NDArray])
x -= 0.1 * layer.input_grad
assert_type(ag.softmax(x), NDArray)
assert_type(ag.scaled_masked_softmax(x, x, out=None), NDArray)
assert_type(ag.log_softmax_backward(x, x, out=x), np.ndarray[tuple[int, int], np.dtype[np.float64]])

class Tensor:
    pass

assert_type(ag.softmax(x, out=Tensor()), Tensor)
assert_type(ag.cross_entropy(x, t, out=Tensor()).loss, Tensor)
print(layer.bias_grad.shape, layer.predicted.max())
print(ag.linear_cross_entropy_backward(x, w, t, lse=found.lse).weight_grad.sum())
assert_type(ag.linear_top_k(x, w, 2).log_prob, NDArray)
input_grad, weight_grad = ag.fused_linear_cross_entropy_loss_grad(x, x, w, t, t, 0.0, x, x)
weight_grad += 1.0
print(parallel.linear_cross_entropy(x, w, t, comm=None).weight_grad.sum())
print(parallel.data_parallel_linear_cross_entropy(x, w, t, comm=None).input_grad.sum())
ag.cross_entropy(x, t).gradient  # error: attr-defined
ag.cross_entropy(x, t, reduction="average")  # error: arg-type
ag.cross_entropy(x, t).loss.backward()  # error: attr-defined
""",
    "torch": """
import torch
import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad.torch.compat import cce, liger, verl

x, w, t = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3), torch.tensor([0, 3])
assert_type(agt.cross_entropy(x, t), torch.Tensor)
assert_type(agt.cross_entropy(x, t, w, reduction="none", temperature=t, ignore_index=3), torch.Tensor)
assert_type(agt.cross_entropy(x, t, outputs=()), torch.Tensor)
assert_type(agt.linear_cross_entropy(x, w, t, softcap=2.0, linear_bias=None, group=None), torch.Tensor)
agt.linear_cross_entropy(x, w, t, denominator=t.sum()).backward()
assert_type(agt.cross_entropy(x, t, outputs=("lse",)), ag.LossResult)
found = agt.linear_cross_entropy(x, w, t, outputs=["log_prob", "entropy"], token_weight=t, num_threads=1)
assert_type(found, ag.LossResult)
(found.log_prob - 0.01 * found.entropy).sum().backward()
agt.cross_entropy(x, t, outputs=("lse",)).backward()  # error: attr-defined
agt.linear_cross_entropy(x, w, t, outputs=("lse",)).backward()  # error: attr-defined
agt.cross_entropy(x, t, smoothing=0.1)  # error: call-overload
agt.cross_entropy(x, t, reduction="average")  # error: call-overload
agt.linear_cross_entropy(x, w, t, num_threads="1")  # error: call-overload

assert_type(cce.linear_cross_entropy(x, w, t), torch.Tensor)
loss, lse = cce.linear_cross_entropy(x, w, t, return_lse=True)
assert_type(liger.liger_fused_linear_cross_entropy(x, w, t), torch.Tensor)
assert_type(liger.liger_fused_linear_cross_entropy(x, w, t, return_z_loss=True), liger.CrossEntropyOutput)
assert_type(liger.liger_cross_entropy(x, t), torch.Tensor)
liger.liger_cross_entropy(x, t, return_token_accuracy=True).token_accuracy.item()
assert_type(liger.LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, t), torch.Tensor)
nll, entropy = liger.LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, t, return_entropy=True)
logprobs, entropy = verl.linear_cross_entropy(x, w, t)
assert_type(cce.VocabParallelOptions.from_vocab(4), cce.VocabParallelOptions)
liger.liger_cross_entropy(x, t, return_z_loss=True).backward()  # error: attr-defined
""",
    "jax": """
import jax
import jax.numpy as jnp
import ascend_grad as ag
import ascend_grad.jax as agj

x, w, t = jnp.zeros((2, 3)), jnp.zeros((4, 3)), jnp.array([0, 3])
assert_type(agj.cross_entropy(x, t, temperature=x, class_weight=w), jax.Array)
assert_type(agj.linear_cross_entropy(x, w, t, bias=w, softcap=1.0, outputs=()), jax.Array)
assert_type(agj.cross_entropy(x, t, -1, outputs=("lse",)), ag.LossResult)
found = agj.linear_cross_entropy(x, w, t, outputs=["log_prob", "entropy"])
(found.log_prob - 0.01 * found.entropy).sum()
agj.cross_entropy(x, t, outputs=("lse",)).sum()  # error: attr-defined
agj.linear_cross_entropy(x, w, t, smoothing=0.1)  # error: call-overload
""",
    "dask": """
import dask.array as da
import ascend_grad.dask as agd
from ascend_grad import LossResult

x, w, t = da.zeros((2, 3)), da.zeros((4, 3)), da.zeros(2, dtype="i8")
assert_type(agd.cross_entropy(x, t), LossResult[da.Array])
agd.cross_entropy(x, t).loss.compute()
agd.cross_entropy(x, t, outputs=("lse",)).lse.compute()
agd.linear_cross_entropy(x, w, t).weight_grad.compute()
agd.linear_top_k(x, w, 2).index.compute()
agd.cross_entropy(x, t).gradient  # error: attr-defined
""",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what mypy prints about all programs. One process reads the types that they share only once."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "mypy.ini").write_text(CONFIGURATION, encoding="utf-8")
    for library, program in PROGRAMS.items():
        (folder / f"{library}_program.py").write_text("from typing import assert_type\n" + program, encoding="utf-8")
    root = Path(ag.__file__).parents[1]
    is_installed = root == Path(sysconfig.get_path("platlib"))  # otherwise mypy does not find the package by itself
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *(f"{library}_program.py" for library in PROGRAMS)],
        cwd=folder,
        env=os.environ | ({} if is_installed else {"MYPYPATH": str(root)}),
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("library", PROGRAMS)
def test_the_types_of_a_program(library: str, output: str):
    pattern = rf"^{library}_program\.py:(\d+): error: .*\[([\w-]+)\]$"
    found = {(int(line), code) for line, code in re.findall(pattern, output, re.MULTILINE)}
    lines = enumerate(PROGRAMS[library].splitlines(), 2)
    assert found == {(i, line.split("# error: ")[1]) for i, line in lines if "# error: " in line}, output
