"""A kernel in a child process: it may raise, die or hang, and the replay goes on with a fresh one.

The child is a fresh interpreter, not a fork, so it holds no state of this process, and a script that calls
`replay` needs no `if __name__ == "__main__"`.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import IO, Any

from tracekit.errors import ProviderFailed, TracekitError, Unavailable, UsageError
from tracekit.model import AttentionCall, DType, Gradients, IndexerCall
from tracekit.relations.base import Relation
from tracekit.relations.indexers import IndexerRelation
from tracekit.replayer.channel import Channel, TooLong, Unreadable
from tracekit.replayer.messages import (
    Answered,
    Baseline,
    Begin,
    Description,
    Message,
    Next,
    Open,
    Refuses,
    Rounds,
    Source,
    Take,
    most_bytes,
    replies,
)

_CHILD = "tracekit.replayer.child"

_OPTIONS = ("-P", "-X", "faulthandler")

_START = 120.0
"""Seconds, at least, for a child to start and make its provider: imports are no launch of a kernel."""

_SIGNALS = {one.value: one.name for one in signal.Signals}

_FAREWELL = 5.0
"""Seconds that a child may take to end once the parent has hung up."""


class Halted(BaseException):
    """The replay has ended, and no child may start; no error of a kernel, so nothing may take it for one."""


class Worker:
    """One child process, started when it is needed, and again after it failed.

    Args:
        source: the provider to run.
        timeout: seconds that one launch may take, the way of the call there and of the answer back included.
        halted: after it no child is started: `Halted` is raised instead.
    """

    def __init__(self, source: Source, timeout: float, halted: Event | None = None) -> None:
        self._halted = halted
        self.source = source
        self.timeout = timeout
        self.description: Description | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._stderr: IO[bytes] | None = None
        self._call: AttentionCall | IndexerCall | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child, while there is one."""
        return None if self._process is None else self._process.pid

    def open(self, source: Source | None = None) -> Description:
        """Make the provider, a new one; `source` exchanges it for another.

        Raises:
            ProviderFailed: it raised, died or did not answer.
            Unavailable: what it needs is not installed.
            UsageError: it does not exist.
        """
        self.source = source or self.source
        self.description = self._ask(Open(self.source))
        return self.description

    def refuses(self, call: AttentionCall | IndexerCall) -> str | None:
        """Return why the provider refuses a call; errors as `open`."""
        self._take(call)
        return self._ask(Refuses())  # type: ignore[no-any-return]

    def roundings(self, call: AttentionCall) -> tuple[DType, DType]:
        """Return the dtypes of scores and of P on a call; errors as `open`."""
        self._take(call)
        return self._ask(Rounds())  # type: ignore[no-any-return]

    def baseline(
        self, call: AttentionCall | IndexerCall, threads: int, relation: Relation | None = None
    ) -> Answered:
        """Run a call as it stands, or as a relation wants it; errors as `open`, and Unsupported."""
        self._take(call)
        return self._ask(Baseline(threads, relation))  # type: ignore[no-any-return]

    def respond(self, call: AttentionCall) -> Answered:
        """Run a call that holds an answer, for a twin that spoils that answer; errors as `baseline`."""
        self._take(call, outputs=True)
        return self._ask(Baseline(0))  # type: ignore[no-any-return]

    def variants(
        self,
        call: AttentionCall | IndexerCall,
        relation: Relation | IndexerRelation,
        seed: int,
        threads: int,
    ) -> Iterator[tuple[str, Answered]]:
        """Run the variants of a call one by one; errors as `baseline`."""
        self._take(call)
        self._ask(Begin(relation, seed, threads))
        while (answer := self._ask(Next())) is not None:
            yield answer

    def close(self) -> None:
        """End the child: it leaves when the parent hangs up, or is killed."""
        if self._process is None:
            return
        if self._channel is not None:
            self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL)
        self._end()

    def kill(self) -> None:
        """End the child from another thread than the one that waits for it, which then finds it dead."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _take(self, call: AttentionCall | IndexerCall, *, outputs: bool = False) -> None:
        """Send a call once, without its outputs: a kernel has no business with the recorded answer."""
        if self._process is None:
            try:
                self._ask(Open(self.source))
            except (Unavailable, UsageError) as error:
                # It could be made before: verdicts depend on it, so this is one more way to fail.
                raise ProviderFailed(str(error), rule=error.rule) from error
        if self._call is not call:
            self._ask(Take(call if outputs else _asked(call)))
            self._call = call

    def _ask(self, message: Message) -> Any:
        if self._process is None:
            self._start()
        assert self._channel is not None
        limit = max(self.timeout, _START) if isinstance(message, Open) else self.timeout
        deadline = time.monotonic() + limit
        try:
            self._channel.send(message, deadline)
            reply = self._channel.receive(deadline, most_bytes(message, self._call))
        except TimeoutError as error:
            self._end()
            raise self._hangs(message, limit) from error
        except (TooLong, Unreadable) as error:
            self._end()
            raise self._garbles(message, error) from error
        except (EOFError, OSError) as error:
            raise self._died(message) from error
        except BaseException:
            # Interrupted between question and answer: the next answer would belong to this question.
            self._end()
            raise
        if isinstance(reply, TracekitError):
            if isinstance(reply, ProviderFailed):
                self._end()
            raise reply
        if not isinstance(reply, replies(message)):
            self._end()
            raise self._garbles(message, f"an object of type {type(reply).__name__}")
        return reply

    def _start(self) -> None:
        if self._halted is not None and self._halted.is_set():
            raise Halted
        ours, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *_OPTIONS, "-m", _CHILD, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._channel = Channel(ours)

    def _hangs(self, message: Message, limit: float) -> ProviderFailed:
        return ProviderFailed(
            f"the kernel did not answer within {limit:g} seconds ({_what(message)}); "
            "set TRACEKIT_TIMEOUT if it needs longer.",
            rule="P-HANGS",
            timeout=limit,
        )

    def _garbles(self, message: Message, what: object) -> ProviderFailed:
        return ProviderFailed(
            f"the process of the kernel sent {str(what)[:200]}, which is no answer ({_what(message)}).",
            rule="P-ANSWER",
        )

    def _died(self, message: Message) -> ProviderFailed:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL)
        code, said = self._process.poll(), self._said()
        self._end()
        if code is None:
            how = "hung up"
        elif code < 0:
            how = f"was ended by signal {-code} ({_SIGNALS.get(-code, 'real time')})"
        else:
            how = f"ended with status {code}"
        return ProviderFailed(
            f"the process of the kernel {how} ({_what(message)}).",
            rule="P-DIED",
            status=code,
            stderr=said,
        )

    def _said(self) -> str:
        """The last words of the child."""
        if self._stderr is None:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        return self._stderr.read().decode(errors="replace").strip()

    def _end(self) -> None:
        """End the child, if it is still there, and whatever it started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._channel is not None:
            self._channel.close()
        if self._stderr is not None:
            self._stderr.close()
        self._process = self._channel = self._stderr = self._call = None


def _asked(call: AttentionCall | IndexerCall) -> AttentionCall | IndexerCall:
    """Return a call without the answers that were recorded."""
    if isinstance(call, IndexerCall):
        return replace(call, scores=None)
    grads = None if call.grads is None else Gradients(call.grads.d_out)  # dO is no answer
    return replace(call, out=None, lse=None, grads=grads)


def _what(message: Message) -> str:
    match message:
        case Open():
            return "while it was made"
        case Baseline():
            return "on the call as it stands"
        case Next():
            return "on a variant of the call"
        case _:
            return "before it ran"
