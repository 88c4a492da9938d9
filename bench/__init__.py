"""Measurements of the speed and accuracy of ascend_grad: cases, rivals, results, their tables and charts."""
