"""Stage tokenize: slices to token batches."""
