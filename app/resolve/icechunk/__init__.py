"""What people ask of Icechunk repositories besides their chunks: refs, history, changes."""
