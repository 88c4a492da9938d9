"""Measurements of calls on PyTorch tensors, with and without gradients: cases, rivals, targets, tables."""
