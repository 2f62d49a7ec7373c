"""The plan: one state and one reason per feature, from settings, release and machine alone."""

import dataclasses
from collections import Counter

import pytest

from sglang_fastpath import contracts, envs
from sglang_fastpath.environment import Environment
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.plan import FeatureRecord, Plan, State, make_plan

FEATURE = CATALOGUE[0]
VERSIONS: dict[str, str | None] = {"flashinfer-python": "0.6.15.post1", "nvidia-cutlass-dsl": "4.5.2"}
H200 = Environment("NVIDIA H200", 90, "13.0", "/usr/local/cuda/bin/nvcc", True, VERSIONS)
ON = envs.Settings(enabled=True)


def needing(*needs: str):
    return [dataclasses.replace(FEATURE, needs=needs)]


@pytest.fixture(scope="module")
def release() -> contracts.Release:
    found = contracts.installed_release()
    assert found is not None
    assert found.version == "0.5.17"
    return found


def test_on_the_installed_release_everything_that_is_switched_on_is_active(release: contracts.Release) -> None:
    plan = make_plan(dataclasses.replace(ON, switches={f.id: True for f in CATALOGUE}), release, H200)
    assert {id: record.state for id, record in plan.records.items()} == {f.id: State.ACTIVE for f in CATALOGUE}
    assert plan.summary("main") == f"active {len(CATALOGUE)}/{len(CATALOGUE)} (main)"


def test_what_has_not_been_measured_is_off_and_the_status_line_says_how_to_switch_it_on(release) -> None:
    unmeasured = {f.id: f.default_off for f in CATALOGUE if not f.measured}
    plan = make_plan(ON, release, H200)
    assert {id: record.reason for id, record in plan.records.items() if record.state is State.OFF} == unmeasured
    off = ", ".join(f"{id} ({why})" for id, why in unmeasured.items())
    assert plan.summary("main") == f"active {len(CATALOGUE) - len(unmeasured)}/{len(CATALOGUE)} (main); off: {off}"


@pytest.mark.parametrize(
    ("versions", "variable", "reason"),
    [
        ({"flashinfer-python": "0.6.15.post1", "nvidia-cutlass-dsl": "4.5.2"}, "0", None),
        ({"flashinfer-python": "0.6.14", "nvidia-cutlass-dsl": "4.5.2"}, "0", "FlashInfer 0.6.14: only the norm of"),
        ({"flashinfer-python": "0.7.2", "nvidia-cutlass-dsl": "4.5.2"}, "0", "FlashInfer 0.7.2: only the norm of"),
        ({}, "0", "FlashInfer is not installed: only the norm of 0.6.15"),
        ({"flashinfer-python": "0.6.15"}, "0", "without nvidia-cutlass-dsl"),
        ({"flashinfer-python": "0.6.15", "nvidia-cutlass-dsl": "4.5.2"}, "1", "FLASHINFER_USE_CUDA_NORM=1"),
    ],
)
def test_the_norm_must_be_flashinfers_of_the_version_that_was_read(
    release, monkeypatch, versions, variable, reason
) -> None:
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", variable)
    machine = dataclasses.replace(H200, versions=versions)
    record = make_plan(ON, release, machine, needing("flashinfer_norm")).records[FEATURE.id]
    assert record.state is (State.UNSUPPORTED if reason else State.ACTIVE)
    assert (reason or "") in record.reason


@pytest.mark.parametrize(
    ("machine", "needs", "reason"),
    [
        (dataclasses.replace(H200, gpu=None, sm=None), ("gpu",), "no NVIDIA GPU"),
        (dataclasses.replace(H200, gpu=None, sm=None), ("sm",), "no NVIDIA GPU"),
        (dataclasses.replace(H200, gpu="NVIDIA A100", sm=80), ("sm",), "SM80 (NVIDIA A100)"),
        (dataclasses.replace(H200, gpu="RTX PRO 6000", sm=120), ("sm",), "SM120"),
        (dataclasses.replace(H200, nvcc=None), ("nvcc",), "CUDA_HOME"),
        (dataclasses.replace(H200, deep_gemm=False), ("deep_gemm",), "pip install sgl-deep-gemm"),
        (dataclasses.replace(H200, gpu=None, sm=None), ("block_fp8_kernels",), "no NVIDIA GPU"),
        (dataclasses.replace(H200, gpu="NVIDIA A100", sm=80), ("block_fp8_kernels",), "SM80 (NVIDIA A100)"),
        (dataclasses.replace(H200, gpu="NVIDIA B200", sm=100), ("block_fp8_kernels",), "SM100 (NVIDIA B200)"),
        (dataclasses.replace(H200, nvcc=None), ("block_fp8_kernels",), "CUDA_HOME"),
        (dataclasses.replace(H200, deep_gemm=False), ("block_fp8_kernels",), "pip install sgl-deep-gemm"),
    ],
)
def test_what_the_machine_lacks_is_named(release, machine: Environment, needs: tuple[str, ...], reason: str) -> None:
    record = make_plan(ON, release, machine, needing(*needs)).records[FEATURE.id]
    assert record.state is State.UNSUPPORTED
    assert reason in record.reason
    assert make_plan(ON, release, H200, needing(*needs)).records[FEATURE.id].state is State.ACTIVE


def test_the_emulation_stands_in_for_the_gpu_and_the_compiler_of_the_block_fp8_kernels_alone(release) -> None:
    bare = dataclasses.replace(H200, gpu=None, sm=None, nvcc=None, deep_gemm=False)
    emulated = dataclasses.replace(ON, emulate=True)
    for need, state in (("block_fp8_kernels", State.ACTIVE), ("gpu", State.OFF)):
        assert make_plan(emulated, release, bare, needing(need)).records[FEATURE.id].state is state


def test_what_a_patch_module_keeps_belongs_to_the_plan_and_is_made_once(release) -> None:
    """A patch is applied again after a revert; its caches and verdicts must not start anew."""
    plan, other = make_plan(ON, release, H200), make_plan(ON, release, H200)
    kept = plan.kept("module", list)
    assert plan.kept("module", list) is kept
    assert plan.kept("another module", list) is not kept
    assert other.kept("module", list) is not kept


def test_states_appear_in_the_status_line_with_their_reasons(release) -> None:
    off = dataclasses.replace(FEATURE, id="other")
    settings = dataclasses.replace(ON, switches={FEATURE.id: False})
    plan = make_plan(settings, release, H200, [FEATURE])
    plan.records["other"] = FeatureRecord(off, State.ACTIVE)
    assert plan.summary("diffusion worker 0") == (
        f"active 1/2 (diffusion worker 0); off: {FEATURE.id} ({FEATURE.env}=0)"
    )


def test_without_sglang_nothing_is_active() -> None:
    assert make_plan(ON, None, H200).records[FEATURE.id].state is State.UNSUPPORTED


def test_native_is_claimed_for_recorded_releases_only(release) -> None:
    newer = dataclasses.replace(release, version="0.5.23")
    assert make_plan(ON, newer, H200).records[FEATURE.id].state is State.NATIVE
    unknown = dataclasses.replace(release, version="0.5.24")
    record = make_plan(ON, unknown, H200).records[FEATURE.id]
    assert record.state is State.DRIFTED
    assert "0.5.24 is not recorded" in record.reason


def test_an_active_feature_that_nothing_reached_is_never_hit(release) -> None:
    plan = make_plan(ON, release, H200)
    record = plan.records[FEATURE.id]
    assert plan.observed(record) == (State.NEVER_HIT, "no call reached it")
    record.fall_back("rare")
    record.fall_back("common")
    record.fall_back("common")
    assert plan.observed(record) == (State.NEVER_HIT, "common")
    assert record.fallbacks == Counter(common=2, rare=1)
    record.hit()
    assert plan.observed(record) == (State.ACTIVE, "")


def test_a_failed_parity_is_shown_with_its_signature(release) -> None:
    import torch

    plan: Plan = make_plan(ON, release, H200)
    record = plan.records[FEATURE.id]
    record.hit()
    plan.guard.run(FEATURE.id, "sig", fast=lambda: torch.zeros(1), stock=lambda: torch.ones(1))
    state, reason = plan.observed(record)
    assert state is State.PARITY_FAILED
    assert "sig" in reason


def test_reasons_that_name_values_do_not_grow_without_bound(release) -> None:
    record = make_plan(ON, release, H200).records[FEATURE.id]
    for number in range(1000):
        record.fall_back(f"address {number}")
    assert len(record.fallbacks) <= 33
    assert record.fallbacks.total() == 1000


def test_the_first_hit_is_announced_once(release) -> None:
    record = make_plan(ON, release, H200).records[FEATURE.id]
    seen: list[int] = []
    record.on_first_hit = lambda record: seen.append(record.hits)
    record.hit()
    record.hit()
    assert seen == [1]


@pytest.mark.parametrize(("parity", "admitted"), [("bitwise", False), ("ulp", True)])
def test_the_parity_policy_reaches_the_guard(release, parity: str, admitted: bool) -> None:
    """One ulp of difference, for a feature that is allowed one under the `ulp` policy."""
    import torch

    close = dataclasses.replace(FEATURE, parity="ulp", max_ulp=1)
    plan = make_plan(dataclasses.replace(ON, parity=parity), release, H200, [close])
    one = torch.ones(1)
    plan.guard.run(close.id, "sig", fast=lambda: torch.nextafter(one, one + 1), stock=lambda: one)
    (verdict,) = plan.guard.verdicts
    assert (verdict["verdict"] == "admitted") is admitted
