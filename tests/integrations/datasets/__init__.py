"""Streams of Hugging Face's ``datasets`` as sources."""
