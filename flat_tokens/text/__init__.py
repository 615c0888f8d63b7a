"""Source text: the formats of source files, and the only reader of each."""
