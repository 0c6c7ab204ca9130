"""Local processes over shared memory: windows read in place, waits that burn no core."""

from echelon.world.shm.group import ShmGroup as ShmGroup
from echelon.world.shm.start import connect as connect

__all__ = ["ShmGroup", "connect"]
