"""The numpy form over inputs that lie between canaries, and a heap that holds something."""

from dataclasses import replace

from tracekit.model import Array
from tracekit.providers.guarded import Guarded, filled_heap
from tracekit.providers.placement import Fill
from tracekit.providers.tka1 import numpy_form
from tracekit.providers.tka1.inputs import FamilyInput, Inputs, Lists, Outputs, Ranges


def run(inputs: Inputs, fill: Fill) -> Outputs:
    """Compute a launch; what numpy allocates on the way is filled too, its smallest pieces excepted.

    Raises:
        ProviderFailed: `P-CANARY`, it wrote into an input or beside one.
        Unsupported: `S1-FLUSH`, as the numpy form.
    """
    memory = Guarded(fill)
    moved: dict[int, Array] = {}

    def held(array: Array) -> Array:
        # keys that are values too stay one array
        if id(array) not in moved:
            moved[id(array)] = memory.held(array, inputs.dtype if array.itemsize == 2 else None)
        return moved[id(array)]

    def family(one: FamilyInput) -> FamilyInput:
        part = one.selection
        selection: Ranges | Lists
        if isinstance(part, Lists):
            selection = Lists(held(part.ids), held(part.offsets))
        else:
            selection = Ranges(held(part.lo), held(part.hi))
        return replace(
            one, keys=tuple(map(held, one.keys)), values=tuple(map(held, one.values)), selection=selection
        )

    guarded = replace(
        inputs,
        q=held(inputs.q),
        request=held(inputs.request),
        sink=None if inputs.sink is None else held(inputs.sink),
        families=tuple(map(family, inputs.families)),
    )
    with filled_heap(fill):
        out = numpy_form.run(guarded)
    memory.check()
    return out
