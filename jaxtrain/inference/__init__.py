"""What is done with trained parameters."""
