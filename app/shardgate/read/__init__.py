"""Read the bytes of virtual keys: find containers, cache what is decoded, share reads."""
