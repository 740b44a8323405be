"""What the service shows of its work: counts, lines of the log, and traces."""
