"""The row-wise operators: named cases, rivals, accuracy, targets, tables."""
