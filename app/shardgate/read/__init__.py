"""Read the bytes of virtual keys: find containers, cache decoded values, share reads."""
