"""Icechunk repositories, format versions 1 and 2, as the Zarr hierarchies of their snapshots."""
