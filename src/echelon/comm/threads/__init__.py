"""Simulated ranks: threads of one process that hand each other their tensors."""
