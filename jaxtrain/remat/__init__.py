"""Which activations the backward pass keeps."""
