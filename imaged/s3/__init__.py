"""A chunk store in a bucket of an S3 server: docs/s3.md."""
