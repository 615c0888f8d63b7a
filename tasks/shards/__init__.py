"""Stage shard-write: token batches to token shards."""
