"""PyTorch tensors: what is measured of calls on them, with gradients and without, and what is to be reached."""
