"""Bytes of objects, wherever they lie; nothing here knows a container format."""
