"""Authentication of callers, and the rules of what they may read and write."""
