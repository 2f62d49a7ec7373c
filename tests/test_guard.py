"""The parity guard: the byte comparison, the verdicts, and agreement among real processes.

Run as a script, this file is one launch of several ranks with SGLang diffusion's own process groups; it
prints what each rank saw as JSON (see `ranks_report`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fastpath.guard import (
    Agreement,
    Difference,
    Guard,
    GuardPolicy,
    Outcome,
    Verdict,
    compare,
    tensor_parallel_agreement,
)

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
COMPLEX = [torch.complex64, torch.complex128]
ONCE = GuardPolicy("once")


# --- compare ------------------------------------------------------------------------------------------------


def tensor_of(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor whose elements have exactly these bytes, in row-major order, laid out in memory as named."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    if not raw.size:
        dense = torch.empty(shape, dtype=words[dtype.itemsize])
    else:
        dense = torch.from_numpy(raw.reshape(-1).copy()).view(words[dtype.itemsize]).reshape(shape)
    if layout == "transposed" and shape:
        dense = dense.movedim(0, -1).contiguous().movedim(-1, 0)
    elif layout == "every other" and shape:
        wide = torch.ones((*shape[:-1], 2 * shape[-1] + 1), dtype=dense.dtype)
        wide[..., 1::2] = dense
        dense = wide[..., 1::2]
    return dense.view(dtype)


def expected_difference(
    fast: np.ndarray, stock: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]
) -> Difference | None:
    """The oracle: bytes and Python integers, element by element."""
    differing = [i for i in range(len(stock)) if fast[i].tobytes() != stock[i].tobytes()]
    if not differing:
        return None
    part = dtype.to_real() if dtype.is_complex else dtype
    distances, nans = [], 0
    for i in differing:
        for ours, theirs in zip(fast[i].reshape(-1, part.itemsize), stock[i].reshape(-1, part.itemsize), strict=True):
            if part not in FLOATS or ours.tobytes() == theirs.tobytes():
                continue
            values = [torch.from_numpy(one.copy()).view(part).double().item() for one in (ours, theirs)]
            nans += any(math.isnan(value) for value in values)
            sign = 1 << (8 * part.itemsize - 1)
            bits = [int.from_bytes(one.tobytes(), "little") for one in (ours, theirs)]
            places = [-(b - sign) if b >= sign else b for b in bits]
            distances.append(abs(places[0] - places[1]))
    return Difference(
        output=0,
        count=len(differing),
        total=len(stock),
        first_index=tuple(int(i) for i in np.unravel_index(differing[0], shape)),
        max_ulp=max(distances) if distances and not nans else None,
        note=f"a NaN on either side in {nans} of them" if nans else "",
    )


LAYOUTS = st.sampled_from(["contiguous", "transposed", "every other"])


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_compare_agrees_with_bytes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([*FLOATS, *INTEGERS, torch.bool, *COMPLEX]))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    total, size = math.prod(shape), dtype.itemsize
    byte = st.integers(0, 1) if dtype is torch.bool else st.integers(0, 255)
    # All-ones and sign patterns put NaNs, infinities and -0 beside random bits.
    element = st.lists(byte, min_size=size, max_size=size) | st.sampled_from(
        [[0] * size] if dtype is torch.bool else [[0] * size, [255] * size, [*[0] * (size - 1), 128]]
    )
    stock = np.array(data.draw(st.lists(element, min_size=total, max_size=total)), dtype=np.uint8)
    stock = stock.reshape(total, size)
    fast = stock.copy()
    if total:
        for position in data.draw(st.lists(st.integers(0, total - 1), max_size=3)):
            if data.draw(st.booleans()):
                fast[position] = data.draw(element)
            elif dtype is not torch.bool:
                fast[position, 0] ^= 1  # the neighbouring value
    ours = tensor_of(fast, dtype, shape, data.draw(LAYOUTS))
    theirs = tensor_of(stock, dtype, shape, data.draw(LAYOUTS))
    assert compare(ours, theirs) == expected_difference(fast, stock, dtype, shape)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_ulp_counts_representable_values(dtype: torch.dtype) -> None:
    """Exhaustive for 8 and 16 bits: the distance is the number of steps from value to value."""
    width = 8 * dtype.itemsize
    values = torch.arange(2**width).to(torch.uint8 if width == 8 else torch.uint16).view(dtype).double()
    both_zeros_once = sorted(set(values[~values.isnan()].tolist()))
    steps = torch.tensor(both_zeros_once, dtype=torch.float64).to(dtype)
    neighbours = compare(steps[:-1], steps[1:])
    ends = compare(steps[0], steps[-1])
    assert neighbours is not None
    assert ends is not None
    assert (neighbours.count, neighbours.max_ulp) == (len(steps) - 1, 1)
    assert ends.max_ulp == len(steps) - 1


def test_float64_distance_beyond_int64() -> None:
    largest = torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)
    found = compare(-largest, largest)
    assert found is not None
    assert found.max_ulp == 2 * 0x7FEF_FFFF_FFFF_FFFF


def test_zeros_and_nans_are_compared_by_their_bits() -> None:
    assert compare(torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(payload, torch.tensor([math.nan])) == Difference(
        0, 1, 1, (0,), None, "a NaN on either side in 1 of them"
    )
    assert compare(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])) == Difference(0, 1, 2, (1,), 0)


def test_infinity_against_nan_has_no_distance() -> None:
    """Their patterns are neighbours; a bound of 1 ulp must not let a NaN pass."""
    nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    found = compare(nan, torch.tensor([math.inf]))
    assert found is not None
    assert found.max_ulp is None


def test_lazy_conjugation_and_negation_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 4 - 3j])
    conjugate = torch.tensor([1 - 2j, 4 + 3j])
    assert z.conj().is_conj()
    assert compare(z.conj(), conjugate) is None
    assert compare(z.conj(), z) == Difference(0, 2, 2, (0,), 2 * 0x40400000)
    assert z.conj().imag.is_neg()
    assert compare(z.conj().imag, conjugate.imag) is None


@pytest.mark.parametrize(
    ("fast", "stock", "output", "note"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), 0, "dtype bfloat16 against float32"),
        (torch.zeros(2, 3), torch.zeros(3, 2), 0, "shape (2, 3) against (3, 2)"),
        (torch.zeros(0, 3), torch.zeros(3, 0), 0, "shape (0, 3) against (3, 0)"),
        (torch.zeros(2, device="meta"), torch.zeros(2), 0, "device meta against cpu"),
        (None, torch.zeros(2), 0, "None against Tensor"),
        ((torch.zeros(2), None), (torch.zeros(2), torch.zeros(2)), 1, "None against Tensor"),
        ((torch.zeros(2),), (torch.zeros(2), None), 0, "tuple of 1 against tuple of 2"),
        ([torch.zeros(2)], (torch.zeros(2),), 0, "list of 1 against tuple of 1"),
        (torch.zeros(2), (torch.zeros(2),), 0, "Tensor against tuple of 1"),
    ],
)
def test_structure_must_match(fast: object, stock: object, output: int, note: str) -> None:
    assert compare(fast, stock) == Difference(output, 0, 0, (), None, note)
    assert str(compare(fast, stock)) == f"output {output}: {note}"


def test_nested_outputs_are_counted_through_and_the_worst_is_reported() -> None:
    stock = (torch.ones(2), [None, (torch.ones(3), torch.arange(4))])
    assert compare(stock, (torch.ones(2), [None, (torch.ones(3), torch.arange(4))])) is None
    near, far = torch.ones(3).nextafter(torch.tensor(2.0)), torch.full((2,), 1.5)
    assert compare((torch.ones(2), [None, (near, torch.arange(4))]), stock) == Difference(2, 3, 3, (0,), 1)
    worst = compare((far, [None, (near, torch.arange(4))]), stock)
    assert worst is not None
    assert (worst.output, worst.max_ulp) == (0, 2**22)
    worst = compare((near[:2], [None, (torch.full((3,), 1.5), torch.arange(4))]), stock)
    assert worst is not None
    assert (worst.output, worst.max_ulp) == (2, 2**22)
    integers = compare((far, [None, (near, torch.arange(4).flip(0))]), stock)
    assert integers == Difference(3, 4, 4, (0,), None)


def test_only_tensors_are_compared() -> None:
    with pytest.raises(TypeError, match="output 1 is a float"):
        compare((torch.zeros(1), 1.0), (torch.zeros(1), 1.0))


def test_compare_accepts_gradients_parameters_and_inference_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        inference = torch.ones(3)
    assert compare(parameter, inference) is None
    assert compare(parameter * 2, inference) == Difference(0, 3, 3, (0,), 2**23)


# --- policies -----------------------------------------------------------------------------------------------


def test_policies_parse() -> None:
    assert GuardPolicy.parse("once") == GuardPolicy("once")
    assert GuardPolicy.parse("sample:50") == GuardPolicy("sample", 50)
    assert GuardPolicy.parse("always") == GuardPolicy("always")
    assert GuardPolicy.parse("off") == GuardPolicy("off")


@pytest.mark.parametrize(
    "text", ["", "onec", "sample", "sample:", "sample:0", "sample:-1", "sample:x", "once:2", "off "]
)
def test_a_policy_that_does_not_exist_is_named_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="once, sample:N") as raised:
        GuardPolicy.parse(text)
    assert repr(text) in str(raised.value)


# --- verdicts -----------------------------------------------------------------------------------------------


@dataclass
class Site:
    """A call site with both paths; `calls` says which ran, in order."""

    wrong: bool = False
    error: BaseException | None = None
    stock_error: BaseException | None = None
    calls: list[str] = field(default_factory=list)

    def fast(self) -> torch.Tensor:
        self.calls.append("fast")
        if self.error:
            raise self.error
        return torch.tensor([1.0, 2.0, 2.5 if self.wrong else 3.0])

    def stock(self) -> torch.Tensor:
        self.calls.append("stock")
        if self.stock_error:
            raise self.stock_error
        return torch.tensor([1.0, 2.0, 3.0])

    def run(self, guard: Guard, signature: object = "s", feature: str = "norm_quant") -> torch.Tensor:
        """One guarded call; `calls` then holds what this call alone ran."""
        self.calls.clear()
        return guard.run(feature, signature, fast=self.fast, stock=self.stock)


STOCK = [1.0, 2.0, 3.0]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_once_checks_the_first_call_and_then_runs_fast_alone() -> None:
    guard, site = Guard(ONCE), Site()
    of_stock = torch.tensor(STOCK)
    assert guard.run("norm_quant", (8, torch.bfloat16), fast=site.fast, stock=lambda: of_stock) is of_stock
    for _ in range(3):
        site.run(guard, (8, torch.bfloat16))
        assert site.calls == ["fast"]
    assert guard.counters == {"checks": 1, "admitted": 1, "failed": 0, "unchecked": {}}
    assert guard.verdicts == [
        {
            "feature": "norm_quant",
            "signature": "(8, torch.bfloat16)",
            "verdict": "admitted",
            "checks": 1,
            "difference": None,
            "reason": "",
        }
    ]


def test_a_mismatch_bans_its_signature_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    guard, bad, good = Guard(ONCE), Site(wrong=True), Site()
    assert bad.run(guard, "M=77").tolist() == STOCK
    assert bad.calls == ["stock", "fast"]
    for _ in range(3):
        assert bad.run(guard, "M=77").tolist() == STOCK
        assert bad.calls == ["stock"]
    good.run(guard, "M=4096")
    good.run(guard, "M=4096")
    assert good.calls == ["fast"]
    other_feature = Site()
    other_feature.run(guard, "M=77", feature="act_quant")
    other_feature.run(guard, "M=77", feature="act_quant")
    assert other_feature.calls == ["fast"]

    (warning,) = warnings_in(caplog)
    for part in ("norm_quant", "M=77", "1 of 3 elements", "(2,)", "2097152 ulp"):
        assert part in warning
    assert guard.counters == {"checks": 3, "admitted": 2, "failed": 1, "unchecked": {}}
    failed = guard.verdicts[0]
    assert failed["verdict"] == "parity-failed"
    assert failed["difference"] == {
        "output": 0,
        "count": 1,
        "total": 3,
        "first_index": (2,),
        "max_ulp": 2097152,
        "note": "",
    }
    json.dumps(guard.verdicts)


def test_sample_rechecks_one_admitted_call_in_n() -> None:
    guard, site = Guard(GuardPolicy.parse("sample:3")), Site()
    pattern = []
    for _ in range(8):
        site.run(guard)
        pattern.append(len(site.calls) == 2)
    assert pattern == [True, False, False, True, False, False, True, False]
    assert guard.verdicts[0]["checks"] == 3


def test_a_recheck_bans_and_returns_stocks_result(caplog: pytest.LogCaptureFixture) -> None:
    guard, site = Guard(GuardPolicy.parse("sample:2")), Site()
    site.run(guard)
    site.wrong = True
    assert site.run(guard).tolist() == [1.0, 2.0, 2.5]  # between two checks the fast path answers
    assert site.run(guard).tolist() == STOCK
    site.run(guard)
    assert site.calls == ["stock"]
    assert len(warnings_in(caplog)) == 1
    assert guard.counters["failed"] == 1
    assert guard.counters["admitted"] == 0


def test_always_checks_every_call() -> None:
    guard, site = Guard(GuardPolicy.parse("always")), Site()
    for _ in range(3):
        assert site.run(guard).tolist() == STOCK
        assert site.calls == ["stock", "fast"]
    assert guard.counters["checks"] == 3


def test_off_never_checks() -> None:
    guard, site = Guard(GuardPolicy.parse("off")), Site(wrong=True)
    assert site.run(guard).tolist() == [1.0, 2.0, 2.5]
    assert site.calls == ["fast"]
    assert guard.counters == {"checks": 0, "admitted": 0, "failed": 0, "unchecked": {}}
    assert guard.verdicts == []


# --- who captures a fast path in a graph: `checks`, `failures`, `withdraw` -----------------------------------------


def test_checks_count_the_calls_that_ran_both_paths() -> None:
    guard, site = Guard(GuardPolicy.parse("sample:3")), Site()
    for _ in range(8):
        before = guard.checks
        site.run(guard)
        assert guard.checks - before == (len(site.calls) == 2)
    assert guard.checks == guard.counters["checks"] == 3
    site.run(guard, "another")
    assert guard.checks == 4


@pytest.mark.parametrize("policy", ["once", "sample:3"])
def test_a_trusted_call_is_no_check_and_a_banned_one_neither(policy: str) -> None:
    guard, good, bad = Guard(GuardPolicy.parse(policy)), Site(), Site(wrong=True)
    good.run(guard, "good")
    bad.run(guard, "bad")
    assert guard.checks == 2
    good.run(guard, "good")
    bad.run(guard, "bad")
    assert guard.checks == 2
    assert Guard(GuardPolicy.parse("off")).checks == 0


def test_a_check_without_a_verdict_counts_as_one() -> None:
    """What ran in it is not what the next call runs."""
    guard, site = Guard(ONCE), Site(error=torch.OutOfMemoryError("tried to allocate"))
    for count in (1, 2):
        site.run(guard)
        assert guard.checks == count


def test_failures_count_signatures_sent_to_stock_for_good() -> None:
    guard, bad, later = Guard(GuardPolicy.parse("sample:2")), Site(wrong=True), Site()
    assert guard.failures == 0
    for _ in range(3):
        bad.run(guard, "bad")
        assert guard.failures == 1
    later.run(guard, "later")
    assert guard.failures == 1
    later.wrong = True
    later.run(guard, "later")
    later.run(guard, "later")
    assert guard.failures == 2
    raising = Site()
    raising.run(guard, "raising")
    raising.error = RuntimeError("misaligned address")
    raising.run(guard, "raising")
    assert guard.failures == 3
    Site(error=torch.OutOfMemoryError("tried to allocate")).run(guard, "no verdict")
    assert guard.failures == 3


@pytest.mark.parametrize("policy", ["once", "sample:100", "always"])
def test_what_is_withdrawn_is_checked_anew(policy: str) -> None:
    guard, site = Guard(GuardPolicy.parse(policy)), Site()
    other = Site()
    for each in (site, other):
        each.run(guard, each is site)
    guard.withdraw("norm_quant", True)
    assert guard.verdict("norm_quant", True) is None
    assert guard.verdict("norm_quant", False) is Verdict.ADMITTED
    site.wrong = True  # another fast path: what was known of the old one is worth nothing
    assert site.run(guard, True).tolist() == STOCK
    assert site.calls == ["stock", "fast"]
    assert guard.verdict("norm_quant", True) is Verdict.FAILED
    other.run(guard, False)
    assert other.calls == (["stock", "fast"] if policy == "always" else ["fast"])


def test_what_failed_cannot_be_withdrawn() -> None:
    guard, site = Guard(ONCE), Site(wrong=True)
    site.run(guard)
    site.wrong = False
    guard.withdraw("norm_quant", "s")
    assert guard.verdict("norm_quant", "s") is Verdict.FAILED
    site.run(guard)
    assert site.calls == ["stock"]
    assert guard.failures == 1


def test_what_was_never_seen_can_be_withdrawn() -> None:
    guard, site = Guard(ONCE), Site()
    guard.withdraw("norm_quant", "s")
    assert guard.verdicts == []
    site.run(guard)
    assert guard.verdict("norm_quant", "s") is Verdict.ADMITTED


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate"),
        torch.cuda.OutOfMemoryError("tried to allocate"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_in_fast_is_no_verdict(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    guard, site = Guard(ONCE), Site(error=error)
    for _ in range(2):
        assert site.run(guard).tolist() == STOCK
        assert site.calls == ["stock", "fast"]
    assert guard.verdicts == []
    assert guard.counters["unchecked"] == {"out of memory": 2}
    site.error = None
    site.run(guard)
    assert guard.verdicts[0]["verdict"] == "admitted"

    site.error = error  # also of an admitted signature: stock answers this call, the verdict stands
    assert site.run(guard).tolist() == STOCK
    assert site.calls == ["fast", "stock"]
    site.error = None
    site.run(guard)
    assert site.calls == ["fast"]
    assert warnings_in(caplog) == []


class TooBig(torch.Tensor):
    """A tensor on which every operation runs out of memory, as the comparison's temporaries may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.ne or func.__name__ == "ne":
            raise torch.OutOfMemoryError("tried to allocate")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_out_of_memory_in_the_comparison_is_no_verdict() -> None:
    guard = Guard(ONCE)
    stock = torch.ones(3)
    result = guard.run("f", "s", fast=lambda: torch.ones(3).as_subclass(TooBig), stock=lambda: stock)
    assert result is stock
    assert guard.verdicts == []
    assert guard.counters["unchecked"] == {"out of memory": 1}


@pytest.mark.parametrize("mode", ["once", "always"])
def test_what_stock_raises_is_the_callers(mode: str) -> None:
    guard = Guard(GuardPolicy.parse(mode))
    site = Site(stock_error=torch.OutOfMemoryError("tried to allocate"))
    with pytest.raises(torch.OutOfMemoryError):
        site.run(guard)
    assert site.calls == ["stock"]
    assert guard.verdicts == []
    site.stock_error = None
    site.run(guard)
    assert guard.verdicts[0]["verdict"] == "admitted"


def test_an_exception_during_a_check_is_a_failed_verdict(caplog: pytest.LogCaptureFixture) -> None:
    guard, site = Guard(ONCE), Site(error=ValueError("no kernel for N=576"))
    assert site.run(guard).tolist() == STOCK
    site.run(guard)
    assert site.calls == ["stock"]
    (warning,) = warnings_in(caplog)
    assert "ValueError: no kernel for N=576" in warning
    assert guard.verdicts[0]["reason"] == "ValueError: no kernel for N=576"


@pytest.mark.parametrize("mode", ["once", "sample:100"])
def test_an_exception_of_an_admitted_signature_bans_it(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    guard, site = Guard(GuardPolicy.parse(mode)), Site()
    site.run(guard)
    site.error = RuntimeError("misaligned address")
    assert site.run(guard).tolist() == STOCK
    assert site.calls == ["fast", "stock"]
    site.error = None
    site.run(guard)
    assert site.calls == ["stock"]
    (warning,) = warnings_in(caplog)
    assert "misaligned address" in warning
    assert guard.counters["failed"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("admitted", [False, True])
def test_interrupts_pass_through(error: type[BaseException], admitted: bool) -> None:
    guard, site = Guard(ONCE), Site()
    if admitted:
        site.run(guard)
    site.error = error()
    with pytest.raises(error):
        site.run(guard)
    site.error = None
    site.run(guard)
    site.run(guard)
    assert site.calls == ["fast"]


def test_results_in_the_same_memory_prove_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An in-place kernel whose caller forgot to clone would always be equal to stock."""
    guard, x = Guard(ONCE), torch.ones(4)
    guard.run("f", "s", fast=lambda: x.mul_(3), stock=lambda: x.add_(1))
    assert guard.verdicts[0]["verdict"] == "parity-failed"
    assert "same memory" in warnings_in(caplog)[0]


def test_a_parameter_may_be_passed_through_by_both() -> None:
    guard, bias = Guard(ONCE), torch.nn.Parameter(torch.ones(4))
    guard.run("f", "s", fast=lambda: (torch.ones(4), bias), stock=lambda: (torch.ones(4), bias))
    assert guard.verdicts[0]["verdict"] == "admitted"


def test_outputs_that_cannot_be_compared_are_not_admitted() -> None:
    guard = Guard(ONCE)
    assert guard.run("f", "s", fast=lambda: 1.0, stock=lambda: 1.0) == 1.0
    assert guard.verdicts[0]["verdict"] == "parity-failed"


def test_ulp_bounds_apply_to_the_named_features_under_the_ulp_policy_only() -> None:
    off_by_2097152_ulp = Site(wrong=True)

    def verdict(feature: str, **options: Any) -> str:
        guard = Guard(ONCE, **options)
        assert off_by_2097152_ulp.run(guard, feature=feature).tolist() == STOCK
        return str(guard.verdicts[0]["verdict"])

    bounds = {"step_graph": 2097152, "act_quant": 2097151}
    assert verdict("step_graph", parity="ulp", max_ulp=bounds) == "admitted"
    assert verdict("act_quant", parity="ulp", max_ulp=bounds) == "parity-failed"
    assert verdict("norm_quant", parity="ulp", max_ulp=bounds) == "parity-failed"
    assert verdict("step_graph", parity="bitwise", max_ulp=bounds) == "parity-failed"


def test_ulp_bounds_never_excuse_integers_or_nans() -> None:
    guard = Guard(ONCE, parity="ulp", max_ulp={"f": 2**40})
    scales = torch.arange(4)
    guard.run("f", "int", fast=lambda: (torch.ones(1), scales + 1), stock=lambda: (torch.ones(1), scales))
    guard.run("f", "nan", fast=lambda: torch.tensor([math.nan]), stock=lambda: torch.tensor([math.inf]))
    assert [v["verdict"] for v in guard.verdicts] == ["parity-failed"] * 2


def test_observers_hear_each_verdict_once_and_cannot_break_a_call() -> None:
    heard: list[tuple[Verdict, str, object]] = []

    def observe(verdict: Verdict, feature: str, signature: object) -> None:
        heard.append((verdict, feature, signature))
        raise OSError("disk full")

    guard, site = Guard(GuardPolicy.parse("always"), on_event=observe), Site()
    for _ in range(3):
        site.run(guard, (1,))
    site.wrong = True
    for _ in range(3):
        assert site.run(guard, (1,)).tolist() == STOCK
    assert heard == [(Verdict.ADMITTED, "norm_quant", (1,)), (Verdict.FAILED, "norm_quant", (1,))]


def test_threads_share_verdicts_and_a_failure_stands(caplog: pytest.LogCaptureFixture) -> None:
    """Eight threads reach the same new signature together; half of the checks find a difference."""
    guard, gate = Guard(ONCE), threading.Barrier(8)
    results: list[torch.Tensor] = []

    def worker(wrong: bool) -> None:
        def fast() -> torch.Tensor:
            gate.wait(30)  # every thread is inside its check before the first verdict falls
            return torch.tensor([9.0] if wrong else [1.0])

        results.append(guard.run("f", "s", fast=fast, stock=lambda: torch.tensor([1.0])))

    threads = [threading.Thread(target=worker, args=(bool(i % 2),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [r.item() for r in results] == [1.0] * 8
    assert len(warnings_in(caplog)) == 1
    assert [v["verdict"] for v in guard.verdicts] == ["parity-failed"]
    assert guard.run("f", "s", fast=lambda: torch.tensor([9.0]), stock=lambda: torch.tensor([1.0])).item() == 1.0


# --- torch.compile ------------------------------------------------------------------------------------------


@dataclass
class Compiled:
    """A guarded call site in a compiled function, and how often Dynamo compiled it."""

    guard: Guard
    compilations: int = 0

    def __post_init__(self) -> None:
        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
            self.compilations += 1
            return graph.forward

        guard = self.guard

        def forward(x: torch.Tensor) -> torch.Tensor:
            signature = (tuple(x.shape), x.stride(), x.dtype)
            return guard.run("f", signature, fast=lambda: x + 1, stock=lambda: x - 1)

        self.compiled = torch.compile(forward, backend=backend, fullgraph=True)


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Off for the whole run, by both means, because the other tests do without torch.compile.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("mode", ["once", "sample:2", "always"])
def test_compiled_code_runs_stock_unless_admitted_and_is_not_recompiled(mode: str) -> None:
    guard = Guard(GuardPolicy.parse(mode))
    site, x = Compiled(guard), torch.zeros(3)
    for _ in range(4):
        assert site.compiled(x).tolist() == [-1.0] * 3
    assert site.compilations == 1
    assert guard.verdicts == []
    assert guard.counters["unchecked"] == {"compiling": 1}

    same = torch.zeros(5)
    guard.run("f", ((3,), (1,), torch.float32), fast=lambda: torch.ones(3), stock=lambda: torch.ones(3))
    guard.run("f", "unrelated", fast=lambda: same + 1, stock=lambda: same + 1)
    for _ in range(4):
        assert site.compiled(x).tolist() == [1.0] * 3
    assert site.compilations == 2
    assert guard.counters["checks"] == 2
    assert guard.counters["unchecked"] == {"compiling": 1}


@pytest.mark.usefixtures("dynamo")
def test_compiled_code_leaves_a_signature_that_gets_banned() -> None:
    guard = Guard(GuardPolicy.parse("always"))
    site, x = Compiled(guard), torch.zeros(3)
    key = ((3,), (1,), torch.float32)
    guard.run("f", key, fast=lambda: torch.ones(3), stock=lambda: torch.ones(3))
    assert site.compiled(x).tolist() == [1.0] * 3
    guard.run("f", key, fast=lambda: torch.ones(3), stock=lambda: torch.zeros(3))
    assert site.compiled(x).tolist() == [-1.0] * 3
    assert guard.counters["unchecked"] == {}  # no check was missed: the verdict is known


# --- agreement among ranks ----------------------------------------------------------------------------------


def test_without_process_groups_a_rank_decides_alone() -> None:
    agree = tensor_parallel_agreement()
    assert [agree("f/s", 1, outcome) for outcome in Outcome] == list(Outcome)


def test_an_agreement_that_fails_bans(caplog: pytest.LogCaptureFixture) -> None:
    def broken(subject: str, number: int, outcome: Outcome) -> Outcome:
        raise ConnectionError("store unreachable")

    guard, site = Guard(ONCE, agree=broken), Site()
    assert site.run(guard).tolist() == STOCK
    site.run(guard)
    assert site.calls == ["stock"]
    assert "store unreachable" in warnings_in(caplog)[0]


def test_each_check_takes_part_in_one_agreement() -> None:
    seen: list[tuple[int, Outcome]] = []

    def agree(subject: str, number: int, outcome: Outcome) -> Outcome:
        seen.append((number, outcome))
        return outcome

    guard, site = Guard(GuardPolicy.parse("sample:2"), agree=agree), Site()
    site.stock_error = ValueError("stock")
    with pytest.raises(ValueError, match="stock"):
        site.run(guard)
    site.stock_error = None
    site.error = torch.OutOfMemoryError("x")
    site.run(guard)
    site.error = None
    site.run(guard)
    site.run(guard)
    site.run(guard)
    assert seen == [(1, Outcome.NO_VERDICT), (2, Outcome.NO_VERDICT), (3, Outcome.MATCH), (4, Outcome.MATCH)]
    # An admitted fast path that raises between two checks answers the next one in advance: the others wait.
    site.error = ValueError("fast")
    site.run(guard)
    assert seen[4:] == [(5, Outcome.FAILED)]
    site.run(guard)
    site.run(guard)
    assert len(seen) == 5


RANKS = 4
LATE = 2.0  # seconds that a rank waits for one that does not come


def scenarios(rank: int) -> dict[str, Any]:
    """What one of four ranks does and sees; rank 2 is the odd one."""
    odd = rank == 2
    agree, agree_in_time = tensor_parallel_agreement(), tensor_parallel_agreement(LATE)
    report: dict[str, Any] = {}

    def record(name: str, guard: Guard, results: list[torch.Tensor], site: Site) -> None:
        report[name] = {
            "verdicts": [(v["verdict"], v["reason"]) for v in guard.verdicts],
            "unchecked": guard.counters["unchecked"],
            "results": [r.tolist() for r in results],
            "last call": list(site.calls),
        }

    def play(
        name: str,
        policy: str,
        steps: list[Callable[[Site], None]],
        signature: object = "s",
        agree: Agreement = agree,
    ) -> None:
        guard, site, start = Guard(GuardPolicy.parse(policy), agree=agree), Site(), time.monotonic()
        results = []
        for step in steps:
            if odd:
                step(site)
            results.append(site.run(guard, signature, feature=name))
        record(name, guard, results, site)
        report[name]["seconds"] = time.monotonic() - start

    def nothing(site: Site) -> None:
        pass

    def wrong(site: Site) -> None:
        site.wrong = True

    def out_of_memory(site: Site) -> None:
        site.error = torch.OutOfMemoryError("tried to allocate")

    def broken(site: Site) -> None:
        site.error = RuntimeError("misaligned address")

    def late(site: Site) -> None:
        time.sleep(2 * LATE)

    def healed(site: Site) -> None:
        site.error = None

    play("match", "once", [nothing, nothing])
    play("mismatch", "once", [wrong, nothing])
    play("out of memory", "once", [out_of_memory, healed, nothing])
    play("recheck", "sample:2", [nothing, nothing, wrong, nothing])
    play("broken between checks", "sample:2", [nothing, broken, nothing, nothing])
    play("broken long before a check", "sample:1000", [nothing, broken, nothing])

    guard, site = Guard(ONCE, agree=agree), Site()
    site.stock_error = ValueError("stock") if odd else None
    try:
        site.run(guard, feature="stock raises")
    except ValueError:
        report["raised"] = True
    site.stock_error = None
    record("stock raises", guard, [site.run(guard, feature="stock raises")], site)

    # Against the rules: the odd rank's signature differs, or it comes too late. Nobody may hang or run fast.
    play("astray", "once", [nothing, nothing], "odd" if odd else "even", agree_in_time)
    play("late", "once", [late, nothing], agree=agree_in_time)
    return report


def run_rank(rank: int, port: int) -> dict[str, Any]:
    import torch.distributed as dist
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    parallel_state.init_distributed_environment(RANKS, rank, local_rank=rank, backend="gloo")
    parallel_state.initialize_model_parallel(
        tensor_parallel_degree=2, sequence_parallel_degree=2, ulysses_degree=2, backend="gloo"
    )
    report = scenarios(rank)

    def keys_after(checks: int) -> int:
        for _ in range(checks):
            Site().run(always)
        dist.barrier()
        keys: int = store.num_keys()
        dist.barrier()
        return keys

    always = Guard(GuardPolicy.parse("always"), agree=tensor_parallel_agreement())
    report["keys"] = [keys_after(2), keys_after(50)]
    parallel_state.destroy_model_parallel()

    # Two guidance branches of two sequence ranks each: the branches decide apart, and differ.
    parallel_state.initialize_model_parallel(
        classifier_free_guidance_degree=2, sequence_parallel_degree=2, ulysses_degree=2, backend="gloo"
    )
    guard, site = Guard(ONCE, agree=tensor_parallel_agreement()), Site(wrong=rank == 2)
    site.run(guard, feature="guidance")
    report["guidance"] = guard.verdicts[0]["verdict"]
    dist.barrier()
    return report


def main() -> None:
    """Forks the ranks after SGLang is imported once, serves their store, prints their reports."""
    import torch.distributed as dist
    from sglang.multimodal_gen.runtime.distributed import parallel_state  # noqa: F401

    def rank_process(rank: int, port_pipe: int, report_pipe: int) -> NoReturn:
        try:
            report = run_rank(rank, int(os.read(port_pipe, 16)))
            os.write(report_pipe, json.dumps(report).encode())
        except BaseException:
            logging.exception("rank %d", rank)
            os._exit(1)
        os._exit(0)

    pipes = [(os.pipe(), os.pipe()) for _ in range(RANKS)]
    children = []
    for rank, ((port_in, _), (_, report_out)) in enumerate(pipes):
        if not (child := os.fork()):
            rank_process(rank, port_in, report_out)
        os.close(report_out)
        children.append(child)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for (_, port_out), _ in pipes:
        os.write(port_out, str(store.port).encode())
    reports = []
    for _, (report_in, _) in pipes:
        with os.fdopen(report_in) as stream:
            reports.append(stream.read())
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")
    print("[" + ",".join(reports) + "]")


@pytest.fixture(scope="module")
def ranks_report() -> list[dict[str, Any]]:
    """Four real ranks, TP 2 x SP 2, gloo, SGLang diffusion's own groups."""
    done = subprocess.run(
        [sys.executable, __file__],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return reports


def verdicts_in(reports: list[dict[str, Any]], scenario: str) -> list[str]:
    return [verdict for report in reports for verdict, _ in report[scenario]["verdicts"]]


def test_ranks_that_all_match_admit(ranks_report: list[dict[str, Any]]) -> None:
    assert verdicts_in(ranks_report, "match") == ["admitted"] * RANKS
    assert [report["match"]["last call"] for report in ranks_report] == [["fast"]] * RANKS


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("mismatch", ""),
        ("recheck", ""),
        ("broken between checks", "RuntimeError: misaligned address"),
    ],
)
def test_one_failing_rank_bans_the_signature_on_every_rank(
    ranks_report: list[dict[str, Any]], scenario: str, cause: str
) -> None:
    """Rank 3 shares a TP group with the failing rank 2, rank 0 an SP group, rank 1 neither."""
    assert verdicts_in(ranks_report, scenario) == ["parity-failed"] * RANKS
    for rank, report in enumerate(ranks_report):
        seen = report[scenario]
        assert seen["last call"] == ["stock"]
        assert all(result == STOCK for result in seen["results"])
        assert seen["verdicts"][0][1] == (cause if rank == 2 else "another rank's fast path failed the check")


def test_one_rank_out_of_memory_leaves_every_rank_without_a_verdict(
    ranks_report: list[dict[str, Any]],
) -> None:
    """The first call gave none; the second checked again and admitted, so the third ran fast."""
    assert verdicts_in(ranks_report, "out of memory") == ["admitted"] * RANKS
    for rank, report in enumerate(ranks_report):
        reason = "out of memory" if rank == 2 else "no verdict on another rank"
        assert report["out of memory"]["unchecked"] == {reason: 1}
        assert report["out of memory"]["last call"] == ["fast"]


def test_a_rank_whose_stock_raises_keeps_nobody_waiting(ranks_report: list[dict[str, Any]]) -> None:
    assert [report.get("raised", False) for report in ranks_report] == [False, False, True, False]
    assert verdicts_in(ranks_report, "stock raises") == ["admitted"] * RANKS
    for rank, report in enumerate(ranks_report):
        missed = {} if rank == 2 else {"no verdict on another rank": 1}
        assert report["stock raises"]["unchecked"] == missed


def test_a_failed_rank_tells_the_others_without_waiting_for_them(ranks_report: list[dict[str, Any]]) -> None:
    assert ranks_report[2]["broken long before a check"]["last call"] == ["stock"]
    assert all(report["broken long before a check"]["seconds"] < 60 for report in ranks_report)


@pytest.mark.parametrize("scenario", ["astray", "late"])
def test_ranks_stop_waiting_for_one_that_does_not_come_and_run_stock(
    ranks_report: list[dict[str, Any]], scenario: str
) -> None:
    assert verdicts_in(ranks_report, scenario) == ["parity-failed"] * RANKS
    assert [report[scenario]["last call"] for report in ranks_report] == [["stock"]] * RANKS
    assert "ranks [2] did not reach this check" in ranks_report[3][scenario]["verdicts"][0][1]
    assert all(report[scenario]["seconds"] < 60 for report in ranks_report)


def test_checks_leave_no_growing_trail_in_the_store(ranks_report: list[dict[str, Any]]) -> None:
    for report in ranks_report:
        early, late = report["keys"]
        assert late == early


def test_guidance_branches_decide_apart(ranks_report: list[dict[str, Any]]) -> None:
    verdicts = [report["guidance"] for report in ranks_report]
    assert verdicts == ["admitted", "admitted", "parity-failed", "parity-failed"]


if __name__ == "__main__":
    main()
