"""Defects that were found, each with the sentence that holds now."""
