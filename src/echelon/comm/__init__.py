"""Groups of ranks, and every call that moves tensors between them."""
