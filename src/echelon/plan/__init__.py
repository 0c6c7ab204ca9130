"""One description of all axes of parallelism, applied to a model."""
