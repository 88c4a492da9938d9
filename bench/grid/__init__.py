"""Random problems (operators, shapes, layouts, dtypes), computed by this library, NumPy, SciPy and PyTorch."""
