"""Cross entropy: with the logits at once, or a block of them at a time."""
