"""Saves that are killed at their calls of the operating system, whoever makes them."""
