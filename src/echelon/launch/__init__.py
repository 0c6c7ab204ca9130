"""Start ranks, pass their endings on, and restart them."""
