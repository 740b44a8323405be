"""Where formats and storage meet: look up, fetch, cache, share, coalesce, retry."""
