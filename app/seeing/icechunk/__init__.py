"""What is counted of Icechunk repositories."""
