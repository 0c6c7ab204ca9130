"""What a device must do: every technique on one device, against one process on the CPU.

Each test takes a ``device`` and runs on the CPU of every machine, over gloo with one rank and on
simulated ranks; where there is CUDA it runs there, too, over NCCL. The modules need no pytest:
``python -m tests.cuda --device cuda`` runs them on a machine that has none.
"""
