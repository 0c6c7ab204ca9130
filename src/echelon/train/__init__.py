"""What a training loop needs around the model."""
