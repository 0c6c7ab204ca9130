"""Checkpoints in the formats of others: safetensors, PyTorch's DCP, and files of ``torch.save``."""
