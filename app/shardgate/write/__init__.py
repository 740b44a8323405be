"""Write chunks and objects: changes are merged, and shards rewritten by compare-and-swap."""
