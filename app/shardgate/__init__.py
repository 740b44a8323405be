"""Shardgate: chunks of sharded arrays over HTTP."""
