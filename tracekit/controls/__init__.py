"""Negative controls: kernels that are right on the baseline call and wrong through one mechanism."""
