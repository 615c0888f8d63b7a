"""The command line: ``python -m flows``."""
