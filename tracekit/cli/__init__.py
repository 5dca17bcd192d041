"""The command line: one file a verb."""

from tracekit.cli.main import main

__all__ = ["main"]
