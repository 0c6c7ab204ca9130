"""Models and programs that nobody designed, trained on many ranks and in one process.

A case is plain data (``draw``), so it can be printed, sent to a rank, made smaller (``shrink``) and
run again. ``modules`` builds its model, ``program`` runs its steps, ``reference`` does both in one
process, and ``ranks`` on the ranks of a world. ``judge`` compares; ``campaign`` runs many.

From the command line: ``python -m tests.generated --seeds 0:100 --world threads``.
"""
