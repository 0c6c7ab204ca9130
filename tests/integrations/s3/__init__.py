"""Checkpoints in a store that speaks S3, which runs on this machine."""
