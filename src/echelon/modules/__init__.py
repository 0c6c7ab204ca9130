"""Hooks on ``nn.Module`` and autograd that every wrapper needs."""
