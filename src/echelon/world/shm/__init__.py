"""Local processes over shared memory: windows that peers read in place, and waits that do not burn a core."""

from echelon.world.shm.group import ShmGroup as ShmGroup
from echelon.world.shm.start import connect as connect

__all__ = ["ShmGroup", "connect"]
