"""What a config trains on: sizes of rows and of the model."""
