"""Checkpoints: what a job has at one step, in files that any number of ranks can read back.

::

    format      what the files are; its docstring is the specification
    header      the beginning of a safetensors file
    checksum    what tells bytes from other bytes

``echelon.values`` says how Python values are written. No file holds a pickle, and reading one never
runs what is in it.
"""

from __future__ import annotations

__all__: list[str] = []
