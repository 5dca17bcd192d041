"""One check of an acceptance run, and what a check of each stage must say to be believed.

A status and the numbers beside it come from one place in the run, so where they contradict each other the
document was not written by it, or was damaged.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = ("self-test", "device", "claims", "graphs", "speed", "sanitizer", "goldens")
COMPARED = frozenset({"held", "bounded", "refuted", "observed same", "observed varies"})
STATUSES = COMPARED | {"inconclusive", "not applicable", "not run", "measured"}
STAND_IN = "tka1"
SUBJECTS: Mapping[str, tuple[str, str]] = {
    "tka1-cuda": (r"sm_\d{2,3}[af]?", r"nvrtc \d+\.\d+"),
    "tka1-hip": (r"gfx[0-9a-f]{3,4}", r"hiprtc \d+\.\d+"),
}
"""Provider of TKA-1 on a device -> how its architecture and its compiler look."""
GPU_KERNELS = (
    *("torch-flash-cuda", "torch-efficient-cuda", "torch-cudnn", "vllm-triton", "flash-attn", "flashinfer"),
    *("flash-mla", "aiter"),
)
LONGEST = 2000
"""Characters of a text."""

_MOST = 1 << 62
_VERDICT = {"claim", "calls", "variants", "differences", "max_ulps", "control", "first"}
_TIMES = {
    *(f"{one} seconds" for one in ("ours", "torch bf16", "torch fp32", "fp32 matmul", "copy")),
    *("ratio to the better torch", "share of fp32 matmul", "share of copy bandwidth"),
}
_OF_THE_SUBJECT = frozenset(STAGES) - {"claims", "goldens"}


class Refused(Exception):
    """A document is no evidence.

    Args:
        rule: the code of the rule that it breaks.
        why: one sentence.
    """

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"{why} ({rule})")
        self.rule = rule


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Args:
        stage: one of `STAGES`.
        name: what, in a few words.
        status: one of `STATUSES`; `held` needs elements that were compared.
        reason: one clause.
        provider: the kernel; empty where a whole stage failed or was not run.
        compared: elements, launches or processes that were compared.
        data: numbers of a measurement, or a verdict; `fault` says which belong to a stage.
    """

    stage: str
    name: str
    status: str
    reason: str
    provider: str = ""
    compared: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


def plain(text: str) -> str:
    """Return a text in one line of printable characters, cut to what a document may hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:LONGEST]


def fields(record: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    """Hold the names and the types of a JSON object against what they must be.

    Raises:
        Refused: `EV-FIELD`.
    """
    for name, kind in kinds.items():
        if name not in record or not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise Refused("EV-FIELD", f"{where} has no {name}, or not as it must be")
        if isinstance(record[name], str) and record[name] != plain(record[name]):
            raise Refused("EV-FIELD", f"{name} of {where} is not one line of at most {LONGEST:,} characters")
    if unknown := sorted(set(record) - set(kinds)):
        raise Refused("EV-FIELD", f"{where} holds {unknown[0]!r}, which the schema does not know")


def parse_check(number: int, record: Any) -> Check:
    """Read the check of a number.

    Raises:
        Refused: `EV-FIELD` or `EV-CHECK`.
    """
    where = f"check {number}"
    if not isinstance(record, dict):
        raise Refused("EV-CHECK", f"{where} is no object")
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("stage", "name", "status", "reason", "provider"), str),
        "compared": int,
        "data": dict,
    }
    fields(record, kinds, where)
    check = Check(**record)
    if check.stage not in STAGES or check.status not in STATUSES or not check.reason or not check.name:
        raise Refused("EV-CHECK", f"{where} has the stage {check.stage!r}, the status {check.status!r}")
    if why := fault(check):
        raise Refused("EV-CHECK", f"{where}, {check.name!r} of {check.stage}, is {check.status}, but {why}")
    return check


def fault(check: Check) -> str:
    """Say in a clause what of a check contradicts its status; empty where nothing does."""
    if not 0 <= check.compared < _MOST:
        return f"{check.compared} elements cannot be compared"
    if check.status in COMPARED and not check.compared:
        return "it compared nothing"
    if check.provider not in {"", STAND_IN, *SUBJECTS, *GPU_KERNELS}:
        return f"no kernel is named {check.provider!r}"
    if check.provider in GPU_KERNELS and check.stage in _OF_THE_SUBJECT:
        return f"{check.provider} has no part in this stage"
    if not check.provider and check.status not in ("inconclusive", "not run"):
        return "it names no kernel"
    if not check.provider and check.name != check.stage:  # a whole stage is called by its name
        return "it names no kernel"
    if not check.data and check.status in ("inconclusive", "not run"):
        return "" if not check.compared else "it says nothing of what it compared"
    return _FAULTS[check.stage](check)


def _self_test(check: Check) -> str:
    from tracekit.providers.tka1 import selftest  # here: a machine that lacks numpy is told so by `needs`

    known = {
        "bf16": (selftest.EXPECTED, selftest.launches),
        "binary16 and binary32": (selftest.EXPECTED_WIDE, selftest.wide_launches),
    }
    if set(check.data) != {"digest"} or check.name not in known or check.status not in ("held", "refuted"):
        return "that is no digest of the wild launches"
    expected, launches = known[check.name]
    if check.compared != len(list(launches())):
        return "there are not so many wild launches"
    digest = check.data["digest"]
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        return "its digest is no SHA-256"
    return "" if (digest == expected) is (check.status == "held") else "its digest says otherwise"


def _counted(check: Check, names: Iterable[str]) -> str:
    """Check numbers of which the first says how much was compared, the second how much of it differed."""
    tried, differing, *_ = wanted = tuple(names)
    if why := _numbers(check.data, wanted):
        return why
    told = check.data
    if told[tried] != check.compared or told[differing] > told[tried]:
        return f"{told[differing]} of {told[tried]} {tried} differ, and {check.compared} were compared"
    status = "not applicable" if not told[tried] else "refuted" if told[differing] else "held"
    return "" if check.status == status else f"{told[differing]} of {told[tried]} {tried} differ"


def _graphs(check: Check) -> str:
    if check.name not in ("soak (host)", "soak (device)", "fresh processes"):
        return "no graph is tried in this way"
    return _counted(check, ("launches", "differing"))


def _device(check: Check) -> str:
    return _counted(check, ("elements", "differing", "refused"))


def _sanitizer(check: Check) -> str:
    return _counted(check, ("runs", "with errors"))


def _claims(check: Check) -> str:
    told = check.data
    if set(told) != _VERDICT or not isinstance(told["claim"], str) or not isinstance(told["control"], str):
        return "its data is no verdict"
    numbers = {name: told[name] for name in ("calls", "variants", "differences", "max_ulps")}
    if why := _numbers(numbers, numbers):
        return why
    if check.status == "measured" or not check.name.startswith(f"{told['claim']} on "):
        return f"it is a verdict on {told['claim']!r}"
    if not (told["first"] is None or isinstance(told["first"], dict)):
        return "its first place is none"
    if told["differences"] > check.compared:
        return "more differs than was compared"
    if told["max_ulps"] and not told["differences"]:
        return "it counts ULP and no difference"
    if not re.fullmatch(r"|[a-z0-9-]+ [a-z ]+", told["control"]):
        return "its control is none"
    if check.status in ("not run", "not applicable"):
        return "it compared something" if check.compared or told["first"] is not None else ""
    if check.status not in COMPARED:
        return ""
    if not told["calls"] or not told["variants"]:
        return "no variant was run"
    if check.status in ("held", "observed same") and (told["differences"] or told["first"] is not None):
        return "something differs"
    if check.status in ("refuted", "observed varies") and (not told["differences"] or not told["first"]):
        return "nothing differs"
    judged = check.status in ("held", "bounded")
    return "its control was not refuted" if judged and not told["control"].endswith(" refuted") else ""


def _speed(check: Check) -> str:
    told = check.data
    wrong = [name for name, value in told.items() if not _positive(value)]
    if check.status != "measured" or check.compared or set(told) != _TIMES or wrong:
        return f"{', '.join(wrong) or 'its data'} is no measurement"
    better = min(told["torch bf16 seconds"], told["torch fp32 seconds"])
    same = math.isclose(told["ratio to the better torch"], better / told["ours seconds"])
    return "" if same else "its ratio is not that of its times"


def _goldens(check: Check) -> str:
    if check.status != "measured" or check.compared or check.data:
        return "that says nothing of a trace that was made"
    return "" if check.name == f"device.{check.provider}.h5" else f"{check.provider} makes no such trace"


_FAULTS: Mapping[str, Callable[[Check], str]] = {
    "self-test": _self_test,
    "device": _device,
    "claims": _claims,
    "graphs": _graphs,
    "speed": _speed,
    "sanitizer": _sanitizer,
    "goldens": _goldens,
}


def _numbers(data: Mapping[str, Any], names: Iterable[str]) -> str:
    if set(data) != set(names):
        return f"its data is {sorted(data)}"
    wrong = [name for name, value in data.items() if type(value) is not int or not 0 <= value < _MOST]
    return f"its {', '.join(wrong)} cannot be" if wrong else ""


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 < value < _MOST
