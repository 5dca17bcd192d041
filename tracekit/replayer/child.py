"""The child process: makes a provider, runs variants of a call, sends answers back. Judges nothing.

Started as `python -P -m tracekit.replayer.child FD PARENT` with one end of a socket pair and the id of the
process that started it. Without `-P` a file of the working folder could stand in for a module of the standard
library. What a provider raises never leaves as a traceback: it becomes an error with a rule.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, IndexerCall
from tracekit.providers.base import Launch, Provider, roundings
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider
from tracekit.providers.perform import perform
from tracekit.relations.base import Variant, base_of
from tracekit.relations.indexers import IndexerVariant
from tracekit.replayer import plain
from tracekit.replayer.channel import Channel
from tracekit.replayer.choices import gather_choices
from tracekit.replayer.messages import (
    Answered,
    Baseline,
    Begin,
    Message,
    Next,
    Open,
    Refuses,
    Rounds,
    Take,
    gather,
)

_PR_SET_PDEATHSIG = 1


class Child:
    """The state of one child: a provider, a call, and its variants."""

    provider: Provider | IndexerProvider
    call: AttentionCall | IndexerCall
    variants: Iterator[Variant | IndexerVariant]
    threads: int = 0

    def answer(self, message: Message) -> Any:
        """Do what a message asks."""
        match message:
            case Open(source):
                self.provider = provider = source.make()
                return plain.description(provider, indexer=source.indexer)
            case Take(call):
                self.call = call
                return None
            case Refuses():
                return self._refuses()
            case Rounds():
                own: Any = self.provider
                return roundings(own, self.call)  # type: ignore[arg-type]
            case Baseline(threads, relation):
                call = self.call
                if isinstance(call, IndexerCall):
                    return self._run(IndexerLaunch((call,)), threads)
                return self._run(base_of(relation, call), threads)
            case Begin(relation, seed, threads):
                variants: Any = relation.variants
                self.variants, self.threads = variants(self.call, seed), threads
                return None
            case Next():
                variant = next(self.variants, None)
                return variant and (variant.name, self._varied(variant))

    def _varied(self, variant: Variant | IndexerVariant) -> Answered:
        answered = self._run(variant.launch, self.threads)
        return replace(answered, free=variant.free) if isinstance(variant, Variant) else answered

    def _run(self, launch: Launch | IndexerLaunch, threads: int) -> Answered:
        """Run a launch; where it asks for no number of threads, with those of the user."""
        if not launch.execution.threads:
            launch = replace(launch, execution=replace(launch.execution, threads=threads))
        own: Any = self.provider
        if isinstance(launch, IndexerLaunch):
            answered = gather_choices(launch, own.run(launch))
        else:
            answered = gather(launch, perform(own, launch))
        executed, schedule = plain.identity(answered.executed), plain.schedule(answered.schedule)
        return replace(answered, executed=executed, schedule=schedule)

    def _refuses(self) -> str | None:
        refuses: Any = self.provider.refuses
        try:
            return plain.refusal(refuses(self.call))
        except Unsupported as error:  # said in another way than the protocol has it, but said
            return plain.said(error) or "it raised Unsupported"


def serve(channel: Channel) -> None:
    """Answer messages until the parent hangs up."""
    child = Child()
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        reply: Any
        try:
            reply = child.answer(message)
        except BaseException as error:  # a provider may raise anything, SystemExit included
            reply = plain.failure(error, opening=isinstance(message, Open))
        channel.send(reply)


def die_with(parent: int) -> None:
    """Let this process end when its parent does, even in the middle of a kernel that never returns.

    Linux does it; elsewhere the process ends at its next look at the socket.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
