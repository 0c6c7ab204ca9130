"""Local processes over shared memory: windows read in place, waits that burn no core."""

from echelon.comm.shm.group import ShmGroup as ShmGroup
from echelon.comm.shm.start import connect as connect

__all__ = ["ShmGroup", "connect"]
