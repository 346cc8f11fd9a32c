"""Chunks: how large the physical allocations of a buffer are, where they come from and where they go."""
