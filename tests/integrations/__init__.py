"""Echelon inside of trainers, launchers and trackers that others wrote."""
