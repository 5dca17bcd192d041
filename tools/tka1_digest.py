"""Print the self-test digests of the numpy form, for the constants of the self-test.

They may change only with the name of the definition.
"""

from tracekit.providers.tka1 import numpy_backward, numpy_form, selftest

if __name__ == "__main__":
    for launches in (selftest.launches, selftest.wide_launches):
        print(selftest.digest(numpy_form.run, numpy_form.partials, launches))
    print(selftest.digest_backward(numpy_backward.run))
