"""A small language model as a torch module, trained with this library's loss and with torch's.

It alone compares losses, times and peak memory of training with autograd.
"""
