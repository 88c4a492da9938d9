"""``python -m ascend_grad.parallel.demo``: a language model whose vocabulary is split over processes.

It alone shows that the split gives the losses of one process, and measures the communication.
"""
