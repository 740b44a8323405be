"""Refs, history, commits and sessions of Icechunk repositories."""
