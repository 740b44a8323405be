"""Survey collections of shards: what `shardgate inspect` and `verify` report."""
