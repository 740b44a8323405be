"""Zarr v3 hierarchies, and the codec ``sharding_indexed`` (ZEP 2, version 1.0) in them."""
