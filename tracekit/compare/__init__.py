"""Comparison in bits: where two answers differ, by how much, and whether that is allowed."""
