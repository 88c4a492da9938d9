"""``python -m ascend_grad.parallel.demo``: a language model whose vocabulary is split over processes."""
