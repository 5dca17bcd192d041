"""Kernels that can be run again, one a file."""
