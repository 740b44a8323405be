"""Virtual keys over HTTP: admission, reads, writes, and the dialect of S3."""
