"""Measurements of losses with options: named and random logits, linear layers, JAX; targets and tables."""
