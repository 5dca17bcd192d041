import pytest

from tracekit.providers.tka1 import native


@pytest.fixture(params=list(native.BUILDS), scope="session")
def build(request: pytest.FixtureRequest) -> native.Library:
    """Every build of the C++ that this machine can run."""
    if missing := native.absent(request.param):
        pytest.skip(missing)
    return native.load(request.param)


@pytest.fixture(scope="session")
def best() -> native.Library:
    """The build that serves here."""
    if not native.available():
        pytest.skip("no native build on this machine")
    return native.load(native.available()[0])
