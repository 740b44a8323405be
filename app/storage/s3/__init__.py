"""Objects of S3 and of the servers that speak it; botocore is spoken to here."""
