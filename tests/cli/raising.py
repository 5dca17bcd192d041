"""A provider that raises inside its kernel."""

from tracekit.providers.portable import Tka1


class Raising(Tka1):
    id = "raising"

    def run(self, launch):
        raise MemoryError("out of registers")
