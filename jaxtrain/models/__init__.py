"""Shipped models and the contract they share with everybody's own."""
