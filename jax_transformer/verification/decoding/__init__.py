"""Greedy decoding on both sides, with caches and without, token by token."""
