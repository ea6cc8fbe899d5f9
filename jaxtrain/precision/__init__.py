"""The number formats of a step: policies, loss scaling and quantized arrays."""
