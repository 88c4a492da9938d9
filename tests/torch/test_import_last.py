"""Test what an import loads, and that extension modules load in a process that has already loaded many libraries.

OpenMP's library has variables in static thread-local storage. The loader reserves a small part of this storage for
libraries that are loaded later, and refuses a library for which too little is left.
"""


def test_import_after_other_libraries(run_script):
    script = """
        import jax, scipy.linalg, sklearn.ensemble, torch
        import jax.numpy as jnp
        jnp.ones(3).sum().block_until_ready(), torch.ones(3).sum()
        loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
        assert len(loaded) > 100, len(loaded)
        import numpy as np
        import ascend_grad as ag
        x = np.ones((64, 4096), np.float32)
        assert np.array_equal(ag.softmax(x, num_threads=2), np.full(x.shape, 1 / 4096, np.float32))
    """
    run_script(script)


def test_the_import_does_not_load_the_compiler(run_script):
    """The compiler of PyTorch takes a second to import."""
    run_script("import sys, ascend_grad.torch.compat; assert 'torch._dynamo' not in sys.modules")
