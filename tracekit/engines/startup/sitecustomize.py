"""Python runs this at its start, because `tracekit record -- CMD` puts this folder on PYTHONPATH.

It waits for an engine: when the module of one is imported, tracekit's plug-in for it is called. Until then
nothing of tracekit is imported, so that every other Python program under CMD starts as it always does. The
sitecustomize that this one hides runs first. Without TRACEKIT_RECORD nothing happens.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

RECORD = os.environ.get("TRACEKIT_RECORD", "")
HERE = os.path.dirname(os.path.abspath(__file__))
PLUGINS = {
    "transformers.modeling_utils": "tracekit.engines.transformers_plugin",
    "megatron.core.models.common.language_module.language_module": "tracekit.engines.megatron_plugin",
}
"""The module of an engine, and the plug-in whose `register` is called when it has been imported."""


class Watch:
    """A finder that finds nothing itself, and has the plug-in called behind the module that it waits for."""

    def __init__(self) -> None:
        self._waiting = dict(PLUGINS)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the ordinary spec of an engine's module, with a loader that calls the plug-in."""
        plugin = self._waiting.pop(name, None)
        spec = None if plugin is None else importlib.util.find_spec(name)
        if spec is None or spec.loader is None or plugin is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: object) -> None:
            execute(module)  # type: ignore[arg-type]
            call(plugin)

        try:
            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        except Exception as error:
            tell(f"{name} cannot be waited for: {error!r}")
        return spec


def call(plugin: str) -> None:
    """Call a plug-in; the program goes on whatever comes of it."""
    try:
        importlib.import_module(plugin).register()
    except Exception as error:
        tell(repr(error))


def tell(reason: str) -> None:
    """Say that this process is not recorded: to its user, and by a file to `tracekit record`."""
    stem, suffix = os.path.splitext(RECORD)
    rank = os.environ.get("RANK", "")
    marker = f"{stem}.rank{rank if rank.isdigit() else 0}-{os.getpid()}{suffix}.started"
    try:
        with open(marker, "w") as file:
            file.write(reason)
        print(
            f"tracekit: nothing is recorded in process {os.getpid()}: {reason}", file=sys.stderr, flush=True
        )
    except (OSError, ValueError):
        return


def run_hidden() -> None:
    """Run the sitecustomize that this file stands before, if there is one."""
    rest = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if RECORD:
        sys.meta_path.insert(0, Watch())
    run_hidden()
