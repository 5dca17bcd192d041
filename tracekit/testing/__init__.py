"""Public conformance suites for providers, relations and engines."""
