"""Published models in and out: their weights into the shardings of a mesh, and ours into their folders.

What published files say stands in `published`; here it meets our config, our parameters and jax.
"""
