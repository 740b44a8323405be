"""HTTP in, HTTP out: a plain ASGI data plane in front of a FastAPI control plane."""
