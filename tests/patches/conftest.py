"""What the tests of captured passes share; they ask for it by name (`usefixtures`)."""

from collections.abc import Iterator

import pytest
from step_graphs import counted_passes, on_a_cpu


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """SGLang's runtime on a CPU, its FP8 linear emulated."""
    with on_a_cpu():
        yield


@pytest.fixture
def counted() -> Iterator[None]:
    """`step_graphs.passes` counts this test's passes."""
    with counted_passes():
        yield
