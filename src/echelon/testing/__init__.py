"""Injected faults for tests of users, and a simulated accelerator.

``faults``  ranks that fail, lie, delay or exit at a chosen call
``device``  a device on the CPU that finds races between streams; imported only when it is asked for
"""

from echelon.testing.faults import (
    FAULTS,
    Fault,
    FaultyGroup,
    InjectedFault,
    run_faulty,
    run_ranks,
    slow,
)

__all__ = ["FAULTS", "Fault", "FaultyGroup", "InjectedFault", "run_faulty", "run_ranks", "slow"]
