"""Measurements of the row-wise operators: cases, rivals, accuracy, targets, tables."""
