"""Resolve virtual keys to bytes, and write them back: the only callers of stores."""
