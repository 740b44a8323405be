"""Zarr v3 with the codec ``sharding_indexed`` (ZEP 2), and the draft of 2022 before it."""
