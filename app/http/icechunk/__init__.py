"""The routes by which Icechunk repositories change."""
