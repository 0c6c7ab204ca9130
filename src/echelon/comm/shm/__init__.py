"""The world of processes of one host, which communicate through shared memory.

In reading order::

    start         the ranks find each other's memory and compare facts
    rank_table    who has joined, left or failed; liveness by pidfds; sleeping, waking and time-outs
    futex         sleeping on a word of shared memory
    segment       shared memory that no crash can leave behind
    area          the shared memory of one group: rounds, signatures of calls, small data
    collectives   each collective by the fastest path that its data allows
    direct        large collectives that read the memory of peers (``peer_memory``)
    staged        large collectives that copy through shared memory
    mailbox       point-to-point messages, through one ``message_ring`` for each pair of ranks
    group         all of this as a ``Group``
"""

from echelon.comm.shm.group import ShmGroup as ShmGroup
from echelon.comm.shm.start import connect as connect

__all__ = ["ShmGroup", "connect"]
