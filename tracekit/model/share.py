"""Which part of a parallel job one process recorded: what `merge` needs to put the parts together."""

from dataclasses import dataclass

from tracekit.errors import InvalidCall


@dataclass(frozen=True)
class Share:
    """The place of a process in its job.

    Data-parallel processes work on other requests. The tensor-parallel processes of one of them work on the
    same requests, each on its heads: process `tensor` of `tensor_size` has the query heads
    `tensor * H / tensor_size ..` of all H, and key heads likewise where there are at least as many KV heads
    as processes; else `tensor_size / kv_heads` neighbours hold a copy of one.

    Args:
        rank: number of the process in the job, from 0.
        world: processes of the job.
        data: its data-parallel number, from 0.
        data_size: how many there are.
        tensor: its tensor-parallel number, from 0.
        tensor_size: how many there are.
        kv_heads: KV heads of the whole model; 0 where not known, which matters only with `tensor_size`.

    Raises:
        InvalidCall: `M-SHARE` for a number that does not fit its size.
    """

    rank: int = 0
    world: int = 1
    data: int = 0
    data_size: int = 1
    tensor: int = 0
    tensor_size: int = 1
    kv_heads: int = 0

    def __post_init__(self) -> None:
        pairs = ((self.rank, self.world), (self.data, self.data_size), (self.tensor, self.tensor_size))
        if any(not 0 <= number < size for number, size in pairs) or self.kv_heads < 0:
            raise InvalidCall(
                f"rank {self.rank} of {self.world}, data-parallel {self.data} of {self.data_size}, "
                f"tensor-parallel {self.tensor} of {self.tensor_size}: numbers count from 0 and are below "
                "their size.",
                rule="M-SHARE",
            )

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world} (data {self.data}/{self.data_size}, "
            f"tensor {self.tensor}/{self.tensor_size})"
        )
