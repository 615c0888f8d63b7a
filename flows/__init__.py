"""The flows: the order of the work on one screen each, and the command line that runs them."""
