"""The parity guard on a GPU: CUDA graph capture, and the cost of a comparison."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch

from sglang_fastpath.guard import Difference, Guard, GuardPolicy, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def capture(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`call` recorded as a CUDA graph; the returned function replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


@pytest.mark.parametrize("mode", ["once", "sample:1", "always"])
def test_capture_takes_stock_until_the_signature_is_admitted(mode: str) -> None:
    x = torch.zeros(1024, device="cuda")
    guard = Guard(GuardPolicy.parse(mode))
    same, ran = True, []

    def call() -> torch.Tensor:
        def fast() -> torch.Tensor:
            ran.append("fast")
            return x + 1 if same else x + 2

        def stock() -> torch.Tensor:
            ran.append("stock")
            return x + 1

        return guard.run("f", tuple(x.shape), fast=fast, stock=stock)

    replay = capture(call)
    assert ran == ["stock"]
    assert guard.verdicts == []
    assert guard.counters["unchecked"] == {"capturing": 1}
    assert compare(replay(), torch.ones_like(x)) is None

    call()
    assert ran == ["stock", "stock", "fast"]
    replay = capture(call)
    assert ran == ["stock", "stock", "fast", "fast"]
    assert guard.counters["checks"] == 1
    assert compare(replay(), torch.ones_like(x)) is None

    if mode != "once":
        same = False
        assert compare(call(), torch.ones_like(x)) is None
        ran.clear()
        capture(call)
        assert ran == ["stock"]


def test_off_runs_fast_while_capturing() -> None:
    x = torch.zeros(8, device="cuda")
    guard = Guard(GuardPolicy.parse("off"))
    replay = capture(lambda: guard.run("f", "s", fast=lambda: x + 2, stock=lambda: x + 1))
    assert replay().tolist() == [2.0] * 8


def test_real_exhaustion_of_the_memory_is_no_verdict() -> None:
    guard, x = Guard(GuardPolicy.parse("once")), torch.ones(8, device="cuda")

    def fast() -> torch.Tensor:
        return torch.empty(1 << 50, device="cuda")

    assert guard.run("f", "s", fast=fast, stock=lambda: x) is x
    assert guard.verdicts == []
    assert guard.counters["unchecked"] == {"out of memory": 1}


def test_equal_outputs_cost_one_synchronization_and_no_copy() -> None:
    fast = tuple(torch.randn(512, 1024, device="cuda").to(d) for d in (torch.bfloat16, torch.float8_e4m3fn))
    stock = tuple(t.clone() for t in fast)
    compare(fast, stock)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert compare(fast, stock) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "called a synchronizing" in str(w.message)]) == 1
    elements = 512 * 1024
    assert torch.cuda.max_memory_allocated() - before < 1.1 * elements  # a byte per element, one output at a time


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int32,
        torch.uint8,
        torch.int64,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_device_and_cpu_measure_the_same_difference(dtype: torch.dtype, transposed: bool) -> None:
    """Random bit patterns, NaNs among them; the CPU's answer is checked against bytes in test_guard.py."""
    generator = torch.Generator().manual_seed(0)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (300, 257 * size), dtype=torch.uint8, generator=generator)
    stock = raw.view(dtype)
    changed = raw.clone()
    changed[7, 5 * size] ^= 1
    changed[250, ::size] ^= 1
    fast = changed.view(dtype)
    if transposed:
        fast = fast.T
        stock = stock.T.contiguous()
    on_cpu = compare(fast, stock)
    assert on_cpu is not None
    assert compare(fast.cuda(), stock.cuda()) == on_cpu
    assert on_cpu.count == 258
    assert compare(stock.cuda(), stock.cuda()) is None


def test_zeros_nans_and_devices_on_the_gpu() -> None:
    def on_gpu(*values: float) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    assert compare(on_gpu(math.nan), on_gpu(math.nan)) is None
    assert compare(on_gpu(0.0, -0.0), on_gpu(0.0, 0.0)) == Difference(0, 1, 2, (1,), 0)
    assert compare(on_gpu(1.0), torch.ones(1)) == Difference(
        0, 0, 0, (), None, f"device cuda:{torch.cuda.current_device()} against cpu"
    )
