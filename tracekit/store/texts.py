"""The texts and names of a head, parsed: everything that `inspect` shows without touching the payload."""

from tracekit.errors import InvalidCall
from tracekit.model import Array, Conventions, Provenance, RequestKey
from tracekit.store.canonical import parse_canonical
from tracekit.store.head import Head
from tracekit.store.nouns import parse_conventions, parse_provenance, parse_recording
from tracekit.store.rules import corrupt
from tracekit.store.schema import OWNERS


class Texts:
    """Texts of a head whose tables are checked.

    Raises:
        TraceCorrupt: E-15, E-21, E-28 in the recording, a request, or what a call names.
    """

    keys: tuple[RequestKey, ...]
    """The key of each row of `/index/requests`."""

    def __init__(self, head: Head) -> None:
        self._tables = tables = head.tables
        requests = tables["requests"]
        try:
            self.keys = tuple(
                RequestKey(digest.decode("ascii", "replace"), ordinal)
                for digest, ordinal in requests[["digest", "ordinal"]].tolist()
            )
        except InvalidCall as error:
            raise corrupt("E-21", f"In the requests: {error}", noun_rule=error.rule) from None
        recording = parse_canonical(self.raw(0), "recording")
        self.recording = parse_recording(recording)
        self.listed = [row for row, listed in enumerate(requests["listed"].tolist()) if listed]
        aliases = len(self.recording.aliases)
        if len(self.listed) != aliases:
            raise corrupt("E-28", f"{len(self.listed)} listed requests have {aliases} aliases.")
        if self.recording.history is not None:
            _check_history(self.recording.history, tables["arrays"])
        calls = tables["calls"]
        self._conventions = {
            number: parse_conventions(parse_canonical(self.raw(number), "conventions"))
            for number in set(calls["conventions"].tolist())
        }
        self._provenance = {
            number: parse_provenance(parse_canonical(self.raw(number), "provenance"))
            for number in {number for name in OWNERS for number in tables[name]["provenance"].tolist()}
        }

    def raw(self, number: int) -> bytes:
        """Return text `number` as it is stored."""
        entry = self._tables["texts"][number]
        first = int(entry["first"])
        return self._tables["text"][first : first + int(entry["size"])].tobytes()

    def conventions(self, number: int) -> Conventions:
        """Return the conventions of a call."""
        return self._conventions[number]

    def provenance(self, number: int) -> Provenance:
        """Return the provenance of a call."""
        return self._provenance[number]

    def members(self, batch: int) -> tuple[RequestKey, ...]:
        """Return the requests of a batch, in executed order."""
        entry = self._tables["batches"][batch]
        first = int(entry["members"])
        rows = self._tables["members"][first : first + int(entry["member_count"])]
        return tuple(self.keys[row] for row in rows.tolist())


def _check_history(number: int, arrays: Array) -> None:
    if not 0 <= number < len(arrays):
        raise corrupt("E-16", f"The history is array {number}, and there are {len(arrays)}.")
    if int(arrays["width"][number]) != 1:
        raise corrupt("E-28", f"The history is array {number}, whose elements are no bytes.")
