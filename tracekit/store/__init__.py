"""The trace file (docs/format.md)."""
