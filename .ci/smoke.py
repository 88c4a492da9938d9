"""Compare small and large calls with the formulas: smoke.py with-openmp | without-openmp."""

import sys
from pathlib import Path

import numpy as np

import ascend_grad as ag
import ascend_grad.bench


def main(build: str) -> None:
    ag.show_config()
    maps = Path("/proc/self/maps").read_text()
    assert ("libgomp" in maps or "libomp" in maps) == (build == "with-openmp"), ag.show_config(mode="dict")["openmp"]
    assert Path(ag.get_include(), "ascend_grad", "rowwise", "rowwise.h").exists()
    assert ascend_grad.bench.__spec__ is not None

    rng = np.random.default_rng(0)
    for shape in [(3, 5), (500, 3000)]:
        g = rng.standard_normal(shape, np.float32)
        y = ag.softmax(rng.standard_normal(shape, np.float32))
        log_y = np.log(y)
        mask = rng.random((1, 1, *shape)) < 0.3
        d = (g - (g * y).sum(-1, keepdims=True)) * y
        pairs = [
            (ag.softmax_backward(g, y), d),
            (ag.log_softmax_backward(g, log_y), g - g.sum(-1, keepdims=True) * y),
            (
                ag.scaled_masked_softmax_backward(g[None, None], y[None, None], mask, 0.5),
                np.where(mask, 0, d[None, None] / 2),
            ),
        ]
        for got, expected in pairs:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        for threads in (1, 2, 3):
            assert np.array_equal(ag.softmax_backward(g, y, num_threads=threads), pairs[0][0])

    x, w = rng.standard_normal((70, 20), np.float32), rng.standard_normal((500, 20), np.float32)
    target = rng.integers(0, 500, 70)
    expected = ag.linear_cross_entropy(x, w, target, backend="reference")
    for threads in (1, 2, 3):
        for got, right in zip(ag.linear_cross_entropy(x, w, target, num_threads=threads), expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
    print(f"smoke test of the build {build}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
