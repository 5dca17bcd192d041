"""Print the self-test digest of the numpy form, for `EXPECTED` in tracekit/providers/tka1/selftest.py.

It may change only with the name of the definition.
"""

from tracekit.providers.tka1 import numpy_form, selftest

if __name__ == "__main__":
    print(selftest.digest(numpy_form.run, numpy_form.partials))
