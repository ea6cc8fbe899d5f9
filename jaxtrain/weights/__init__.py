"""Published models in and out: their weights into the shardings of a mesh, and ours into their folders.

formats/ reads and writes files, families/ holds one table per family (both without jax); the modules here bring them
together with our config and our parameters.
"""
