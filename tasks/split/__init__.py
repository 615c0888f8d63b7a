"""Stage split: token shards to the final arrays."""
