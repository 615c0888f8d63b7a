"""Stage split: parts to the final arrays."""
