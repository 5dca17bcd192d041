"""tracekit: golden-trace record and replay for LLM attention, in bits."""

__version__ = "0.1.0"
