"""Follows the KV of each request over a recording: what a launch read, held against what is held already.

A request whose KV changed in one generation is lost: nobody knows which tokens its rows are made of. It is
followed again from a higher generation on.
"""

from collections.abc import Callable, Mapping

from tracekit.errors import Unsupported
from tracekit.model import KVFamily
from tracekit.recorder.arena import Arena
from tracekit.recorder.kv_log import Extent, KVLog, RowChanged
from tracekit.recorder.observation import Handle, IndexerObservation, Observation, ReadKV, SeenKV
from tracekit.recorder.requests import Lost, RequestTable

Describe = Callable[[], Observation | IndexerObservation]


class Following:
    """The KV logs of a recording, one for each request, layer and family.

    `stored` counts the bytes that were copied.

    Args:
        requests: marked as lost where their KV changed.
        arena: where the rows are held.
    """

    def __init__(self, requests: RequestTable, arena: Arena) -> None:
        self.stored = 0
        self._requests = requests
        self._arena = arena
        self._logs: dict[tuple[Handle, int, KVFamily], KVLog] = {}

    def observe(
        self,
        step: int,
        layer: int,
        kv: Mapping[Handle, Mapping[KVFamily, SeenKV | ReadKV]],
        describe: Describe,
    ) -> dict[Handle, dict[KVFamily, Extent]]:
        """Log the KV rows of a launch.

        Args:
            step: of the recording.
            layer: of the launch.
            kv: what it read.
            describe: describes the launch, and is asked only where rows changed.

        Raises:
            Unsupported: `R-KV-CHANGED` when they changed in one generation, now or in an earlier step.
        """
        return {
            handle: self._request(step, layer, handle, families, describe) for handle, families in kv.items()
        }

    def _request(
        self,
        step: int,
        layer: int,
        handle: Handle,
        families: Mapping[KVFamily, SeenKV | ReadKV],
        describe: Describe,
    ) -> dict[KVFamily, Extent]:
        request = self._requests[handle]
        generation = max(rows.generation for rows in families.values())
        if request.lost is not None:
            if generation <= request.lost.generation:
                raise Unsupported(
                    f"request {request.alias or handle} is not followed any more, as its KV changed at step "
                    f"{request.lost.step}.",
                    rule="R-KV-CHANGED",
                    request=handle,
                    step=request.lost.step,
                )
            request.lost = None
        extents = {}
        for family, rows in families.items():
            key = handle, layer, family
            log = self._logs.get(key)
            if log is None:
                log = self._logs[key] = KVLog(self._arena)
            held = log.stored
            try:
                extents[family] = log.observe(rows)
            except RowChanged as changed:
                raise self._lost(step, describe(), handle, generation, changed.row) from None
            self.stored += log.stored - held
        return extents

    def _lost(
        self,
        step: int,
        seen: Observation | IndexerObservation,
        handle: Handle,
        generation: int,
        row: int,
    ) -> Unsupported:
        """Follow a request no more, from its first row in this launch on."""
        request = self._requests[handle]
        mine = seen.positions[seen.request == seen.requests.index(handle)]
        request.lost = Lost(step, generation, int(mine.min(initial=len(request.tokens))))
        return Unsupported(
            f"KV row {row} of request {request.alias or handle} changed since it was last read: its cache "
            "was reordered (beam search) or written over, and is not made of its tokens any more; the call "
            "is not kept. Record one sequence a place (num_beams=1), or report a new generation.",
            rule="R-KV-CHANGED",
            request=handle,
            row=row,
        )
