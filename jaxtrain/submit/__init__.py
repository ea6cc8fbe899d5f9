"""What schedulers of clusters are given: scripts and manifests that train what a config describes. No jax here."""
