"""Problems that nobody chose: random operators, shapes, layouts and dtypes, beside NumPy, SciPy and PyTorch."""
