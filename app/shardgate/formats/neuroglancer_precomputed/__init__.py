"""Neuroglancer precomputed volumes, meshes, skeletons and annotations, and their shards."""
