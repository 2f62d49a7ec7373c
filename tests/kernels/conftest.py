"""The compiler, without which no kernel is tested."""

import pytest

from sglang_fastpath import environment


@pytest.fixture(scope="session")
def nvcc() -> str:
    path = environment.detect().nvcc
    if path is None:
        pytest.fail("no nvcc: install the CUDA toolkit or set CUDA_HOME; without it no kernel here is tested")
    return path
