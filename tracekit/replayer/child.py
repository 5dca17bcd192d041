"""The child process: makes a provider, runs variants of a call, sends answers back. Judges nothing.

Started as `python -m tracekit.replayer.child FD` with one end of a socket pair. What a provider raises never
leaves as a traceback: it becomes an error with a rule.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tracekit.errors import ProviderFailed, TracekitError, Unavailable, Unsupported, UsageError
from tracekit.model import AttentionCall, IndexerCall
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider
from tracekit.relations.base import Variant
from tracekit.relations.indexers import IndexerVariant
from tracekit.replayer.choices import gather_choices
from tracekit.replayer.messages import (
    Answered,
    Baseline,
    Begin,
    Description,
    Message,
    Next,
    Open,
    Refuses,
    Take,
    gather,
)

_OWN = (Unsupported, Unavailable, UsageError, ProviderFailed)
"""What a provider may say on purpose; anything else that it raises is a failure of the kernel."""


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
                can = provider.capabilities() if isinstance(provider, Provider) else None
                return Description(provider.id, can, provider.advertised(), provider.identity())
            case Take(call):
                self.call = call
                return None
            case Refuses():
                refuses: Any = self.provider.refuses
                return refuses(self.call)
            case Baseline(threads):
                call = self.call
                alone = IndexerLaunch((call,)) if isinstance(call, IndexerCall) else Launch((call,))
                return self._run(alone, threads)
            case Begin(relation, seed, threads):
                variants: Any = relation.variants
                self.variants, self.threads = variants(self.call, seed), threads
                return None
            case Next():
                variant = next(self.variants, None)
                return variant and (variant.name, self._run(variant.launch, self.threads))

    def _run(self, launch: Launch | IndexerLaunch, threads: int) -> Answered:
        """Run a launch; where it asks for no number of threads, with those of the user."""
        if not launch.execution.threads:
            launch = replace(launch, execution=Execution(threads=threads))
        run: Any = self.provider.run
        if isinstance(launch, IndexerLaunch):
            return gather_choices(launch, run(launch))
        return gather(launch, run(launch))


def serve(connection: Connection) -> None:
    """Answer messages until the parent hangs up."""
    child = Child()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        reply: Any
        try:
            reply = child.answer(message)
        except _OWN as error:
            reply = error
        except BaseException as error:  # a provider may raise anything, SystemExit included
            reply = _raised(error)
        connection.send(reply)


def _raised(error: BaseException) -> TracekitError:
    kind, text = type(error).__name__, " ".join(str(error).split())
    return ProviderFailed(
        f"the kernel raised {kind}{': ' if text else ''}{text[:300]}.",
        rule="P-RAISED",
        exception=kind,
        text=text,
    )


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
