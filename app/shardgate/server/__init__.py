"""HTTP/1.1 and ASGI: requests, bodies, conditions, responses and problem documents."""
