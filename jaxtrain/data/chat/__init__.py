"""Conversations and preferences: files, templates, which tokens are trained, rows."""
