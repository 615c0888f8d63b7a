"""Stage finalize: the final arrays to a published version."""
