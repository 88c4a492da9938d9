"""Test that calls on arrays of other libraries leave nothing behind, and that results may live until the end."""

from __future__ import annotations

import pytest
from processes import with_resident

#: The import of each library, its zeros, other calls to repeat, the number of repeated calls, and an object that the
#: library itself holds at the end.
LIBRARIES = {
    "jax": ("import jax, jax.numpy as jnp", "jnp.zeros", "", 5000, "jax.kept = jax.jit(lambda x: x)(result)"),
    "torch": (
        "import torch\nfrom torch._subclasses import FakeTensorMode",
        "torch.zeros",
        "ag.softmax_backward(x, y, out=out)",
        1_000_000,
        "torch.kept = torch.nn.Parameter(result)",
    ),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> tuple:
    pytest.importorskip(request.param)
    return LIBRARIES[request.param]


def test_calls_leave_nothing_behind(library, run_script):
    imported, zeros, others, count, _ = library
    script = f"""
{imported}
import ascend_grad as ag
x, y, out = {zeros}((64, 128)), {zeros}((64, 128)), {zeros}((64, 128))

def calls(count):
    for _ in range(count):
        ag.softmax_backward(x, y)
        {others}

leave_nothing(calls, 1000, {count}, 16 << 20, x)  # a result that stayed would be 32 KiB for each call
"""
    run_script(with_resident(script))


def test_the_interpreter_ends_while_results_live(library, run_script):
    imported, zeros, _, _, kept_by_the_library = library
    script = f"""
import sys, threading
{imported}
import ascend_grad as ag
kept = [ag.softmax({zeros}(n)) for n in (16, 9 << 20)]
kept.append(kept)
sys.kept = ag.softmax({zeros}(16))
result = ag.softmax({zeros}(16))
{kept_by_the_library}
thread = threading.Thread(target=lambda: kept.append(ag.softmax({zeros}(3))))
thread.start()
thread.join()  # at exit, CPython ends threads that wait for the GIL, which C++ in their frames cannot bear
print("done")
"""
    assert run_script(script).stdout == "done\n"
