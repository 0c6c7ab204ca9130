"""Ranks that are not there: one rank runs as if it had peers that are like it.

``group``  ``LoneGroup``, whose calls return at once
"""
