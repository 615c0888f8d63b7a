"""Rows for training: packed or by document, shuffled, mixed."""
