"""The constants of the header are the ones that the script derives, and numpy reads the same."""

import re
from pathlib import Path

from tools import derive_coefficients
from tracekit.providers.tka1 import arithmetic as ar

KERNELS = Path(__file__).parents[2] / "kernels"


def stored() -> dict[str, int]:
    lines = (KERNELS / "coefficients.txt").read_text().splitlines()
    return {name: int(bits, 16) for name, bits, _ in (line.split() for line in lines)}


def header() -> dict[str, tuple[int, float]]:
    found = re.findall(
        r"#define (TK_\w+) 0x([0-9A-F]{8})u +// +(-?0x1\.\w+p[+-]\d+)", (KERNELS / "tk_math.h").read_text()
    )
    return {name: (int(bits, 16), float.fromhex(value)) for name, bits, value in found}


def test_the_script_prints_the_stored_table():
    assert (
        derive_coefficients.table(derive_coefficients.derive()) == (KERNELS / "coefficients.txt").read_text()
    )


def test_the_header_holds_the_table():
    assert {name: bits for name, (bits, _) in header().items()} == stored()


def test_the_values_in_the_comments_are_those_of_the_bits():
    for name, (bits, value) in header().items():
        assert float(ar.constant(bits)) == value, name


def test_numpy_reads_the_same_constants():
    table = stored()
    assert tuple(table[f"TK_EXP_C{k}"] for k in range(6, 1, -1)) == ar.EXP
    assert tuple(table[f"TK_LOG_C{k}"] for k in range(10, 2, -1)) == ar.LOG
    got = (ar.LOG2E, ar.LN2_HI, ar.LN2_LO, ar.SQRT_HALF)
    assert got == tuple(table[f"TK_{name}"] for name in ("LOG2E", "LN2_HI", "LN2_LO", "SQRT_HALF"))
