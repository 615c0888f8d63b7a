"""Parts: documents somewhere, read one way."""
