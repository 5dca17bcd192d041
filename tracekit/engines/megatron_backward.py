"""The backward of one launch: what came in (dO) and what it gave, seen by hooks on torch's graph.

A tensor hook would see the gradient of a tensor, which is the sum over all that use it: a sink is a parameter
that every microbatch reads. So the hooks stand on the nodes of this launch: before the node that made O, and
behind each node whose next one is what made q, k, v or the sink. Nothing is added to the graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tracekit.engines.megatron_call import CoreCall, flat, kv_rows, rows
from tracekit.engines.megatron_step import Forward
from tracekit.engines.torch_bits import widened
from tracekit.errors import Unsupported
from tracekit.model import Bits, KVFamily, KVRows
from tracekit.recorder.observation import Borrowed, LateGradients

_NODES = 256
"""A launch has some twenty nodes between O and its inputs; a search that finds more has left it."""

_FOREIGN = (
    "rows of padding had a gradient, so those of KV and sink are not of the recorded rows alone and were not "
    "kept: mask padding in the loss"
)

Ended = Callable[[], bool]


def watch(
    call: CoreCall, forward: Forward, late: LateGradients, ended: Ended, computed: Callable[[], None]
) -> None:
    """Fill `late` when the backward of a launch runs.

    Args:
        call: a launch whose output wants a gradient.
        forward: the forward that it belongs to.
        late: gets the gradients.
        ended: whether the recording has ended; then nothing is kept any more.
        computed: told each time that the backward has given all that the launch owes.

    Raises:
        Unsupported: `M-GRAPH` when the inputs cannot be found behind the output.
    """
    inputs = {name: call.given[name] for name in ("query", "key", "value")}
    if isinstance(call.sink, torch.Tensor):
        inputs["sink"] = call.sink
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    uses = _uses(call.out, {name: get_gradient_edge(tensor) for name, tensor in wanted.items()})
    counts = {name: len(found) for name, found in uses.items()}
    backward = _Backward(call.query.shape[-2], call.out.output_nr, forward, late, ended, counts, computed)
    node = call.out.grad_fn
    assert node is not None
    node.register_prehook(backward.begins)
    for name, found in uses.items():
        for user, index in found:
            user.register_hook(_giver(backward, name, index))


def _giver(backward: "_Backward", name: str, index: int) -> Callable[[Any, Any], None]:
    def gives(grad_inputs: Any, _: Any) -> None:
        backward.gives(name, grad_inputs[index])

    return gives


def _uses(out: torch.Tensor, edges: Mapping[str, GradientEdge]) -> dict[str, list[tuple[Any, int]]]:
    """The nodes between an output and its inputs that give a gradient to each of them, and at which place."""
    targets = {(edge.node, edge.output_nr): name for name, edge in edges.items()}
    found: dict[str, list[tuple[Any, int]]] = {name: [] for name in edges}
    waiting: list[Any] = [out.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for index, (behind, place) in enumerate(node.next_functions):
            name = targets.get((behind, place))
            if name is not None:
                found[name].append((node, index))
            elif behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
        if len(seen) > _NODES:
            break
    lost = [name for name, users in found.items() if not users]
    if lost or len(seen) > _NODES or len(targets) < len(edges):
        raise Unsupported(
            f"the graph behind the output does not lead to {', '.join(lost) or 'its inputs alone'}; the "
            "gradients of this launch cannot be told from others.",
            rule="M-GRAPH",
        )
    return found


@dataclass(eq=False)
class _Backward:
    """Collects the gradients of one launch. Nothing that happens here reaches the engine.

    The graph holds this object, so it holds no tensor of the graph: neither would ever be freed.
    """

    heads: int
    place: int
    forward: Forward
    late: LateGradients
    ended: Ended
    uses: dict[str, int]
    computed: Callable[[], None]
    runs: int = 0
    owed: int = 0
    foreign: bool = False
    given: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def begins(self, grads: Any) -> None:
        """dO arrives."""
        self.runs += 1
        if self.ended():
            return
        self.owed = sum(self.uses.values())
        if self.runs > 1:
            self.late.lost = "their backward ran again, and the gradients are those of its first run"
            return
        try:
            grad = grads[self.place]
            self.late.d_out = rows(grad, self.forward, "gradient of O", self.heads)
            self.foreign = _reaches_padding(grad, self.forward)
            if self.foreign:
                self.late.lost = _FOREIGN
        except Exception as error:
            self.late.lost = f"dO could not be read: {error!r}"

    def gives(self, name: str, grad: torch.Tensor | None) -> None:
        """A gradient of an input leaves; one that is used at two places of the launch gets two."""
        if self.ended():
            return
        self.owed -= 1
        if not self.owed:
            self.computed()
        if self.runs != 1:
            return
        if grad is None or (self.foreign and name != "query"):
            return
        try:
            parts = self.given.setdefault(name, [])
            parts.append(grad.detach().clone())
            if len(parts) == self.uses[name]:
                self._keep(name, _sum(self.given.pop(name)))
        except Exception as error:
            self.late.lost = f"the gradient of the {name} could not be read: {error!r}"

    def _keep(self, name: str, grad: torch.Tensor) -> None:
        if name == "query":
            self.late.d_q = rows(grad, self.forward, "gradient of q")
        elif name == "sink":
            self.late.d_sink = widened(grad, "gradient of the sink")
        else:
            self.held[name] = grad
            if len(self.held) == 2:
                self._keep_kv()

    def _keep_kv(self) -> None:
        keys, values = self.held.pop("key"), self.held.pop("value")
        for index, handle in enumerate(self.forward.handles):
            k, v = (_by_row(kv_rows(grad, self.forward, index, "gradient of KV")) for grad in (keys, values))
            rows_of = KVRows(k, v, 0, self.forward.recomputed)
            self.late.d_kv[handle] = {KVFamily.DENSE: rows_of}


def _reaches_padding(grad: torch.Tensor, forward: Forward) -> bool:
    """Whether dO is not zero where padding stands: a query that no trace holds then adds to KV and sink."""
    padding = np.ones(forward.batch * forward.length, np.bool_)
    padding[forward.row_slots] = False
    every = flat(grad, forward, "gradient of O")
    return bool(Bits(every.data[padding], every.dtype).to_float32().any())


def _by_row(borrowed: Borrowed) -> Bits:
    return Bits(borrowed.data.transpose(1, 0, 2).copy(), borrowed.dtype)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Two gradients add up to the same bits in either order; for more the order is not known.

    Raises:
        Unsupported: `M-GRAPH`.
    """
    if len(parts) > 2:
        raise Unsupported(f"{len(parts)} gradients of one tensor, in an unknown order.", rule="M-GRAPH")
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
