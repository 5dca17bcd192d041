"""Print the self-test digests of the numpy form, for `EXPECTED` and `EXPECTED_WIDE` of the self-test.

They may change only with the name of the definition.
"""

from tracekit.providers.tka1 import numpy_form, selftest

if __name__ == "__main__":
    for launches in (selftest.launches, selftest.wide_launches):
        print(selftest.digest(numpy_form.run, numpy_form.partials, launches))
