"""The constants of the header are the ones that the script derives, and numpy reads the same."""

import re
from pathlib import Path

import numpy as np

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


def test_the_polynomials_err_by_no_more_than_the_document_says():
    """Evaluated in binary64, so without the roundings of the kernel."""
    exp, log = ([float(ar.constant(bits)) for bits in table] for table in (ar.EXP, ar.LOG))
    r = np.linspace(-np.log(2) / 2, np.log(2) / 2, 200_001)
    f = np.linspace(np.sqrt(0.5) - 1, np.sqrt(2) - 1, 200_001)
    f = f[np.abs(f) > 1e-6]
    error_of_exp = (1 + r + r**2 * np.polyval(exp, r)) / np.exp(r) - 1
    error_of_log = (f - f**2 / 2 + f**3 * np.polyval(log, f)) / np.log1p(f) - 1
    assert np.abs(error_of_exp).max() < 2**-27.9
    assert np.abs(error_of_log).max() < 2**-27.2
