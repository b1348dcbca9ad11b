"""Layers: plain callables that are born with their weights."""
