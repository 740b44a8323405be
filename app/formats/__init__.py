"""Where the bytes of chunks lie: pure. One folder per format, no I/O, no HTTP, no caches."""
