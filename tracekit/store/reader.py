"""Open a trace: the head is checked at once, the payload where it is touched."""

import difflib
import os
import stat
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from tracekit.env import settings
from tracekit.errors import TracekitError, TraceMissing, TraceUnreadable, UsageError
from tracekit.model import AttentionCall, IndexerCall, Recording
from tracekit.store.checks import check_tables
from tracekit.store.decode import Decoder
from tracekit.store.head import read_head
from tracekit.store.heads import CallHead, IndexerHead
from tracekit.store.ledger import disagreement
from tracekit.store.limits import NONE
from tracekit.store.payload import Payload
from tracekit.store.rules import corrupt
from tracekit.store.schema import DTYPES, FAMILIES, MODES, ORIGINS, KVRole, Role
from tracekit.store.sizes import decoded_bytes
from tracekit.store.summary import TraceSummary
from tracekit.store.texts import Texts


class Trace:
    """An open trace. Use `open_trace`; it closes itself when it is dropped or left as a context manager.

    `descriptor`, `head` and `payload` are for the store alone.
    """

    def __init__(self, path: Path, descriptor: int, threads: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.head = read_head(descriptor)
        check_tables(self.head)
        self._texts = Texts(self.head)
        wrong = disagreement(self._texts.recording.ledger, self.head.tables["calls"]["step"].tolist())
        if wrong is not None:
            raise corrupt("E-29", f"Of a capture, {wrong[0]}.", step=wrong[1])
        self.payload = Payload(descriptor, self.head, threads)
        self._decoder = Decoder(self.head, self.payload, self._texts)
        self._close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.head.tables["calls"])

    def __iter__(self) -> Iterator[AttentionCall]:
        """Yield the calls in recorded order."""
        return (self.call(index) for index in range(len(self)))

    def close(self) -> None:
        """Close the file; calls that were read stay valid."""
        self.payload.close()
        self._close()

    def call(self, index: int) -> AttentionCall:
        """Return call `index`, bit for bit as it was written.

        Raises:
            UsageError: V-CALL, there is no such call.
            TraceCorrupt: E-15, E-19, E-20, E-21, E-27, E-28.
            ValueError: the trace is closed.
        """
        if not 0 <= index < len(self):
            raise UsageError(
                f"{self.path.name} has no call {index}; valid are 0 to {len(self) - 1}.",
                rule="V-CALL",
                call=index,
                calls=len(self),
            )
        if not self._close.alive:
            raise ValueError(f"{self.path} is closed; read calls inside its `with` block.")
        return self._decoder.call(index)

    def indexer_call(self, index: int) -> IndexerCall:
        """Return call `index` of the indexers; errors as `call`."""
        count = len(self.head.tables["indexer_calls"])
        if not 0 <= index < count:
            valid = f"valid are 0 to {count - 1}" if count else "it holds none"
            raise UsageError(
                f"{self.path.name} has no indexer call {index}; {valid}.",
                rule="V-CALL",
                call=index,
                calls=count,
            )
        if not self._close.alive:
            raise ValueError(f"{self.path} is closed; read calls inside its `with` block.")
        return self._decoder.indexer_call(index)

    def indexer_calls(self) -> Iterator[IndexerCall]:
        """Yield the launches of sparse indexers in recorded order."""
        return (self.indexer_call(index) for index in range(len(self.indexer_heads)))

    @cached_property
    def recording(self) -> Recording:
        """What surrounds the calls.

        Raises:
            TraceCorrupt: E-15, E-19, E-20, E-21.
        """
        text = self._texts.recording
        requests = tuple(
            self._decoder.request(row, alias)
            for row, alias in zip(self._texts.listed, text.aliases, strict=True)
        )
        history = None if text.history is None else self._decoder.history(text.history)
        return Recording(text.identity, requests, text.ledger, dict(text.notes), text.share, history)

    @cached_property
    def heads(self) -> tuple[CallHead, ...]:
        """What is known of each call without its payload, in recorded order."""
        return tuple(self._call_head(index) for index in range(len(self)))

    @cached_property
    def indexer_heads(self) -> tuple[IndexerHead, ...]:
        """What is known of each indexer call without its payload, in recorded order."""
        return tuple(self._indexer_head(index) for index in range(len(self.head.tables["indexer_calls"])))

    @property
    def content_digest(self) -> str:
        """SHA-256, hexadecimal, of what the calls say; as written; `verify_trace` checks it."""
        return self.head.block.content_digest.hex()

    @property
    def file_digest(self) -> str:
        """SHA-256, hexadecimal, that pins the file; `verify_trace` checks what it pins."""
        return self.head.block.file_digest

    def summary(self) -> TraceSummary:
        """Return what the trace holds, in a few numbers."""
        calls = self.head.tables["calls"]
        return TraceSummary(
            path=self.path,
            format="{}.{}".format(*self.head.block.version),
            calls=len(self),
            rows=sum(head.num_rows for head in self.heads),
            requests=len(self.head.tables["requests"]),
            layers=tuple(sorted(set(calls["layer"].tolist()))),
            steps=len(set(calls["step"].tolist())),
            size=self.head.block.length,
            payload=sum(spec.rows * spec.row_bytes for spec in self.head.payload.values()),
            recorded=int(decoded_bytes(self.head).sum()),
            indexer_calls=len(self.head.tables["indexer_calls"]),
            content_digest=self.content_digest,
            file_digest=self.file_digest,
        )

    def _indexer_head(self, index: int) -> IndexerHead:
        tables = self.head.tables
        entry = tables["indexer_calls"][index]
        first = int(entry["tensors"])
        lines = tables["tensors"][first : first + int(entry["tensor_count"])]
        (query,) = (line for line in lines if line["role"] == Role.INDEX_Q)
        _, heads, dim = self.head.payload[f"{Role.INDEX_Q.group}/{int(query['stack'])}"].shape
        batch = int(entry["batch"])
        return IndexerHead(
            index=index,
            layer=int(entry["layer"]),
            step=int(entry["step"]),
            rank=int(entry["rank"]),
            num_rows=int(tables["arrays"]["count"][tables["batches"]["positions"][batch]]),
            num_heads=heads,
            head_dim=dim,
            k=int(entry["k"]),
            family=FAMILIES[entry["family"]],
            requests=self._texts.members(batch),
            kernel=self._texts.provenance(int(entry["provenance"])).executed.kernel,
            has_scores=bool(entry["scores"] != NONE),
        )

    def _call_head(self, index: int) -> CallHead:
        tables = self.head.tables
        entry = tables["calls"][index]
        first = int(entry["tensors"])
        lines = tables["tensors"][first : first + int(entry["tensor_count"])]
        tensors = {Role(line["role"]): line for line in lines}
        q = self.head.payload[f"q/{int(tensors[Role.Q]['stack'])}"]
        first = int(entry["kv"])
        kv = tables["kv"][first : first + int(entry["kv_count"])]
        kv = kv[kv["role"] == KVRole.READ]
        if not kv.size or q.logical is None:
            raise corrupt("E-28", f"Call {index} has no KV.", call=index)
        log = tables["logs"][kv["log"][0]]
        batch = int(entry["batch"])
        origins = {role: ORIGINS[line["origin"]] for role, line in tensors.items()}
        return CallHead(
            index=index,
            layer=int(entry["layer"]),
            step=int(entry["step"]),
            rank=int(entry["rank"]),
            mode=MODES[entry["mode"]],
            num_rows=int(tables["arrays"]["count"][tables["batches"]["positions"][batch]]),
            num_heads=q.shape[1],
            num_kv_heads=int(log["heads"]),
            head_dim=q.shape[2],
            value_dim=int(log["value_dim"]) or int(log["key_dim"]),
            dtype=DTYPES[q.logical.value],
            requests=self._texts.members(batch),
            kernel=self._texts.provenance(int(entry["provenance"])).executed.kernel,
            kv_source=self._texts.conventions(int(entry["conventions"])).kv_source,
            has_sink=bool(entry["sink"] != NONE),
            out=origins.get(Role.OUT),
            lse=origins.get(Role.LSE),
            has_launch_plan=bool(entry["launch"] != NONE),
            has_gradients=Role.D_OUT in tensors,
        )


def open_trace(path: str | os.PathLike[str], *, threads: int = 0) -> Trace:
    """Open a trace and check its head; chunks are checked when they are read.

    Args:
        path: the file.
        threads: workers that decode; 0 for `TRACEKIT_THREADS`, which is the cores by default.

    Raises:
        TraceMissing: F-MISSING, there is no file.
        TraceUnreadable: F-KIND, F-READ.
        TraceTooNew: E-02.
        TraceCorrupt: any rule that docs/format.md marks "open".
    """
    descriptor = open_file(path)
    try:
        return Trace(Path(path), descriptor, threads or settings().threads)
    except TracekitError as error:
        os.close(descriptor)
        raise type(error)(
            f"{path}: {error}", rule=error.rule, **{"path": str(path), **error.fields}
        ) from None
    except BaseException:
        os.close(descriptor)
        raise


def open_file(path: str | os.PathLike[str]) -> int:
    """Open a file for reading.

    Raises:
        TraceMissing: F-MISSING, there is no file; the message names files with a similar name.
        TraceUnreadable: F-KIND, it is a folder, a pipe or a device; F-READ, the system refuses.
    """
    target = Path(path)
    try:
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            raise TraceUnreadable(
                f"{target} is {kind_of(mode)}, not a trace; give the path of a file.",
                rule="F-KIND",
                path=str(target),
            )
        # Should it become a pipe meanwhile, the opening does not wait for a writer.
        return os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except TracekitError:
        raise
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise TraceUnreadable(
            f"{target} cannot be read: {reason}; check its name and who may read it.",
            rule="F-READ",
            path=str(target),
            reason=reason,
        ) from error
    close = _similar(target)
    hint = f"did you mean {' or '.join(close)}?" if close else "check the path."
    raise TraceMissing(f"{target} does not exist; {hint}", rule="F-MISSING", path=str(target), close=close)


def kind_of(mode: int) -> str:
    """Say what a thing in a folder is that is no file."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _similar(target: Path) -> list[str]:
    try:
        names = [item.name for item in target.parent.iterdir() if item.is_file()]
    except OSError:
        return []
    return difflib.get_close_matches(target.name, names, n=3, cutoff=0.6)
