"""What published rules say of a model's learning rate, batch and share of compute."""
