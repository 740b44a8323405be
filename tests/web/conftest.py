"""A provider, a service where people sign in there, and their browsers."""

from tests.support.auth.fixtures import browser, other, provider, running, url

__all__ = ["browser", "other", "provider", "running", "url"]
