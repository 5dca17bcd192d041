"""What a trace holds, in a few numbers."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TraceSummary:
    """What a trace holds.

    Args:
        path: the file.
        format: format version, `0.1`.
        calls: attention calls.
        rows: query rows of all calls.
        requests: requests, named by the recording or by a call.
        layers: layers that have calls, ascending.
        steps: engine steps that have calls.
        size: bytes of the file.
        payload: bytes of the payload datasets, decoded: every KV row once.
        recorded: bytes of Q, KV, O, LSE and gradients as the calls speak of them: KV rows once a call.
        content_digest: SHA-256, hexadecimal, of what the calls say.
        file_digest: SHA-256, hexadecimal, that pins the file.
        indexer_calls: calls of sparse indexers.
    """

    path: Path
    format: str
    calls: int
    rows: int
    requests: int
    layers: tuple[int, ...]
    steps: int
    size: int
    payload: int
    recorded: int
    content_digest: str
    file_digest: str
    indexer_calls: int = 0
