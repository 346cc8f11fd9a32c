"""Buffers: memory as people use it, built on allocations, reservations and mappings."""
