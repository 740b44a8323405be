"""Zarr v3 as drafted in 2022, and the storage transformer ``sharding`` (version 1.0) in it."""
