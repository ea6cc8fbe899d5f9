"""Number formats of a step: policies, loss scaling, quantized arrays."""
