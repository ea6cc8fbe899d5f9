"""Mixture-of-experts layers: routing, products of the experts, exchange over the mesh."""
