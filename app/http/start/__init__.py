"""The start page: what is served, how to read it, and what the service is doing."""
