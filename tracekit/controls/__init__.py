"""The broken twins: one fault a file, right on the baseline call, wrong only through its mechanism."""
