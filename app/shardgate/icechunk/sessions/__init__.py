"""Sessions: object stores with a bucket of their own, whose changes a commit takes."""
