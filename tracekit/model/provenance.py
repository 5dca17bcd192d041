"""Which kernel ran, as evidence: only what was executed counts, what was asked for is kept beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExecutedIdentity:
    """What really ran. Two runs may be compared bit for bit by `recorded` only where this is equal.

    Args:
        kernel: the kernel, such as `transformers.sdpa`, `torch.flash_cpu` or `tka1`.
        libraries: package -> version of everything that can change a bit.
        device: `cpu`, `cuda` or `hip`.
        arch: processor family that the library chooses code by, such as `x86_64` or `sm_90`; empty where
            the bits do not depend on it.
        isa: instruction set that the library chose, such as `avx512_bf16`; empty as above.
    """

    kernel: str
    libraries: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    arch: str = ""
    isa: str = ""

    def differences(self, other: "ExecutedIdentity") -> list[str]:
        """Return one phrase a field that differs, `torch 2.13.0 recorded, 2.14.0 here`."""
        pairs = [
            (name, getattr(self, name) or "any", getattr(other, name) or "any")
            for name in ("kernel", "device", "arch", "isa")
        ]
        for package in sorted({*self.libraries, *other.libraries}):
            pairs.append((package, self.libraries.get(package, "none"), other.libraries.get(package, "none")))
        return [f"{name} {ours} recorded, {theirs} here" for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True)
class Provenance:
    """Where a call comes from.

    Args:
        engine: the engine and its version, `transformers 5.24.0`.
        requested: the kernel that was asked for.
        executed: what ran.
        threads: threads of the kernel; 0 where not known.
        details: anything else worth reading, such as the class of the attention module.
    """

    engine: str
    requested: str
    executed: ExecutedIdentity
    threads: int = 0
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """Which model made a trace.

    Args:
        model: name or folder name of the checkpoint.
        architecture: class of the model.
        weights_digest: SHA-256 over the weights, hexadecimal; empty where not taken.
        config_digest: SHA-256 over the configuration as canonical JSON; empty where not taken.
        model_version: weight generation in the run (0 unless the trainer pushes new weights).
    """

    model: str = ""
    architecture: str = ""
    weights_digest: str = ""
    config_digest: str = ""
    model_version: int = 0
