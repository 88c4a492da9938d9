"""Measurements of the linear cross-entropy operators: cases, rivals, accuracy, targets, tables."""
