"""The modules are loaded into a process that has loaded many libraries already.

`_tasks` and OpenMP's library have variables in the memory that each thread has from its start. The loader keeps a
little of it for libraries that come later, and refuses one that finds too little.
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
