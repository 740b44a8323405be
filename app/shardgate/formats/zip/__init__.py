"""Zip archives: their entries are served as if they were objects."""
