"""The command line ``ascend-grad``."""
