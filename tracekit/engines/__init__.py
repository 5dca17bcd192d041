"""One file an engine; nothing else knows one."""
