"""Recording: owned copies of what an engine's kernels read and wrote."""
