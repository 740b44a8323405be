"""Container formats, one folder each: places of chunks. Pure: no I/O, no HTTP, no caches."""
