"""Requests of S3 clients: the dialect, its XML, and multipart uploads."""
