"""Measurements beside yardsticks: ``python -m tests.benchmarks``, never part of the tests."""
