"""Schedules as data: made, checked, simulated, chosen and drawn."""
