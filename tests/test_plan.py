"""The plan: one state and one reason per feature, from settings, release and machine alone."""

import dataclasses
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_fastpath import contracts, doctor, envs
from sglang_fastpath.environment import Environment
from sglang_fastpath.features import BY_ID, CATALOGUE, FLUX2, LLAMA, QWEN_IMAGE, Feature, Port, llm_family
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


# --- ports ---------------------------------------------------------------------------------------------------------


def port(model: str, **fields: Any) -> Port:
    """A port with a site of its own and one that all ports share, and the same of what it relies on."""
    places = {"sites": (f"m:{model}", "m:site"), "relies_on": (f"m:{model}.part", "m:part")}
    return Port(**{"models": (model,), "patch": f"patch_of_{model}", **places, **fields})


A, B, C = port("A"), port("B"), port("C", models=("C", "D"))
WITH_PORTS = dataclasses.replace(FEATURE, id="cfg_mod_cache", ports=(A, B, C), needs=(), not_for={"E": "it has none"})


def record_of(*ports: Port) -> FeatureRecord:
    return FeatureRecord(dataclasses.replace(WITH_PORTS, ports=ports), State.ACTIVE)


def test_a_feature_knows_its_ports_and_why_a_model_has_none() -> None:
    assert WITH_PORTS.sites == ("m:A", "m:site", "m:B", "m:C")
    assert WITH_PORTS.contract == ("m:A", "m:site", "m:A.part", "m:part", "m:B", "m:B.part", "m:C", "m:C.part")
    assert [WITH_PORTS.port_of(f"patch_of_{model}") for model in "ABX"] == [A, B, None]
    assert [WITH_PORTS.lacks(model) for model in "ACD"] == [None] * 3
    assert WITH_PORTS.lacks("E") == "E: it has none"
    assert WITH_PORTS.lacks("F") == "F: not written for it"
    assert C.name == "C, D"


def test_a_model_that_a_feature_is_not_for_has_no_port_of_it() -> None:
    families = {QWEN_IMAGE, FLUX2}
    for feature in CATALOGUE:
        served = {model for port in feature.ports for model in port.models}
        assert served and not served & feature.not_for.keys(), feature.id
        if feature.path == "diffusion":
            assert families <= served | feature.not_for.keys(), f"{feature.id}: why not the others?"
        assert len({port.patch for port in feature.ports}) == len(feature.ports), "port_of could not tell them apart"


def test_a_feature_is_active_as_long_as_one_of_its_ports_is() -> None:
    record = record_of(A, B)
    assert record.ports == (A, B)
    record.take_out(A, State.DRIFTED, "changed")
    assert (record.state, record.reason, record.ports) == (State.ACTIVE, "", (B,))
    record.take_out(B, State.DRIFTED, "gone")
    assert (record.state, record.reason, record.ports) == (State.DRIFTED, "A: changed; B: gone", ())


@pytest.mark.parametrize(
    ("outs", "state", "reason"),
    [
        ([(A, State.DRIFTED, "same"), (B, State.DRIFTED, "same")], State.DRIFTED, "same"),
        ([(A, State.DRIFTED, "changed"), (B, State.NATIVE, "stock does it")], State.DRIFTED, "changed"),
        ([(A, State.NATIVE, "stock does it"), (B, State.DRIFTED, "changed")], State.DRIFTED, "changed"),
        ([(A, State.NATIVE, "since 1"), (B, State.NATIVE, "since 2")], State.NATIVE, "A: since 1; B: since 2"),
    ],
)
def test_a_feature_without_a_port_says_the_worst_of_them(outs, state: State, reason: str) -> None:
    record = record_of(A, B)
    for out in outs:
        record.take_out(*out)
    assert (record.state, record.reason) == (state, reason)


def test_what_is_said_of_a_feature_is_about_the_model_that_runs() -> None:
    record = record_of(A, B, C)
    plan = Plan(ON, "0.5.17", {"cfg_mod_cache": record})
    record.take_out(B, State.DRIFTED, "changed")
    assert plan.observed(record) == (State.DRIFTED, "changed"), "of no model known yet: what is worth knowing"
    for model, expected in (
        ("A", (State.NEVER_HIT, "no call reached it")),
        ("B", (State.DRIFTED, "changed")),
        ("D", (State.NEVER_HIT, "no call reached it")),
        ("E", (State.UNSUPPORTED, "E: it has none")),
    ):
        plan.serve(model)
        assert plan.observed(record) == expected, model
    plan.serve("A")
    record.hit()
    assert plan.observed(record) == (State.ACTIVE, "")
    plan.serve("B")
    assert plan.observed(record) == (State.DRIFTED, "changed"), "hits in another model are no comfort"
    assert plan.described(record) == "drifted (changed)"


def test_hits_in_a_model_that_never_gave_its_name_count() -> None:
    record = record_of(A, B)
    record.take_out(B, State.DRIFTED, "changed")
    record.hit()
    assert record.observed() == (State.ACTIVE, "")


def test_every_record_learns_which_model_runs() -> None:
    records = {id: FeatureRecord(BY_ID[id], State.ACTIVE) for id in ("bias_fold", "qk_norm_rope")}
    plan = Plan(ON, "0.5.17", records)
    states = {}
    for model in (QWEN_IMAGE, FLUX2, QWEN_IMAGE):
        plan.serve(model)
        states[model] = {id: plan.observed(record) for id, record in records.items()}
    nothing = (State.NEVER_HIT, "no call reached it")
    assert states[QWEN_IMAGE] == {
        "bias_fold": nothing,
        "qk_norm_rope": (State.UNSUPPORTED, "Qwen-Image: qkv_epilogue does it there"),
    }
    assert states[FLUX2] == {
        "bias_fold": (State.UNSUPPORTED, "FLUX.2: its linears have no biases"),
        "qk_norm_rope": nothing,
    }


LANGUAGE = ("gemm_tuner", "rmsnorm_quant", "silu_quant", "qk_norm_rope_kv")


@pytest.mark.parametrize(
    ("architecture", "lacking"),
    [
        ("Qwen3ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"qk_norm_rope_kv": "Qwen2: it has no QK norm"}),
        ("LlamaForCausalLM", {"qk_norm_rope_kv": "Llama: it has no QK norm"}),
        ("Gemma2ForCausalLM", dict.fromkeys(LANGUAGE[1:], "Gemma2ForCausalLM: not written for it")),
        ("Qwen3MoeForCausalLM", dict.fromkeys(LANGUAGE[1:], "Qwen3MoeForCausalLM: not written for it")),
    ],
)
def test_a_loaded_language_model_tells_the_status_line_what_it_lacks(
    release: contracts.Release, architecture: str, lacking: dict[str, str]
) -> None:
    plan = make_plan(dataclasses.replace(ON, switches={f.id: True for f in CATALOGUE}), release, H200)
    plan.narrow("llm")
    assert tuple(plan.records) == LANGUAGE
    plan.loaded(llm_family(architecture))
    unsupported = f"; unsupported: {', '.join(f'{id} ({why})' for id, why in lacking.items())}" if lacking else ""
    assert (
        plan.summary("scheduler") == f"active {len(LANGUAGE) - len(lacking)}/{len(LANGUAGE)} (scheduler){unsupported}"
    )
    for id, record in plan.records.items():
        nothing = (State.NEVER_HIT, "no call reached it")
        assert plan.observed(record) == ((State.UNSUPPORTED, lacking[id]) if id in lacking else nothing)


def test_a_model_of_known_layers_is_served_whatever_its_name(release: contracts.Release) -> None:
    """Mistral's are Llama's: the layers say so while they are built, before the model is loaded."""
    plan = make_plan(dataclasses.replace(ON, switches={f.id: True for f in CATALOGUE}), release, H200)
    plan.serve(LLAMA)
    plan.loaded(llm_family("MistralForCausalLM"))
    assert plan.observed(plan.records["silu_quant"])[0] is State.NEVER_HIT
    record = plan.records["qk_norm_rope_kv"]
    assert record.planned() == (State.UNSUPPORTED, "Llama: it has no QK norm")
    record.hit()
    assert record.planned() == plan.observed(record) == (State.ACTIVE, ""), "a draft model of another family"


def test_the_status_line_names_the_ports_that_are_out() -> None:
    plan = Plan(ON, "0.5.17", {"one": record_of(A, B, C), "two": record_of(A), "three": record_of(B)})
    one, two, _ = plan.records.values()
    for record, id in zip(plan.records.values(), plan.records, strict=True):
        record.feature = dataclasses.replace(record.feature, id=id)
    one.take_out(B, State.DRIFTED, "changed")
    one.take_out(C, State.NATIVE, "stock does it")
    two.take_out(A, State.DRIFTED, "gone")
    assert plan.summary("main") == (
        "active 2/3 (main); native: one in C, D (stock does it); drifted: two (gone), one in B (changed)"
    )


CHANGED = "sglang.multimodal_gen.runtime.models.dits.flux_2:Flux2SwiGLU.forward"


@pytest.fixture
def changed_in_flux2(release: contracts.Release, tmp_path: Path) -> contracts.Release:
    """The release with another function in the place of CHANGED, which FLUX.2's blocks alone rely on."""
    root = tmp_path / "sglang"
    shutil.copytree(release.root, root, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    module = root.parent.joinpath(*CHANGED.partition(":")[0].split(".")).with_suffix(".py")
    text = module.read_text()
    module.unlink()
    module.write_text(text.replace("self.gate_fn(x1) * x2", "x2 * self.gate_fn(x1)"))
    assert module.read_text() != text
    return contracts.Release(release.version, root)


def test_what_changed_in_one_model_is_out_there_alone(changed_in_flux2: contracts.Release) -> None:
    plan = make_plan(ON, changed_in_flux2, H200)
    patch = "sglang_fastpath.patches.diffusion.flux2_blocks"
    for feature in CATALOGUE:
        record, mine = plan.records[feature.id], feature.port_of(patch)
        assert list(record.out) == ([mine] if mine else [])
        if mine:
            assert record.out[mine][0] is State.DRIFTED and CHANGED in record.out[mine][1]
            assert record.state is (State.ACTIVE if len(feature.ports) > 1 else State.DRIFTED), feature.id
    assert f"act_quant in FLUX.2 ({CHANGED}" in plan.summary("main")


def test_doctor_names_the_model_in_which_a_feature_is_not_active(
    changed_in_flux2: contracts.Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts, "installed_release", lambda: changed_in_flux2)
    found = {finding.topic: finding for finding in doctor.examine({"SGLANG_FASTPATH": "1", envs.EMULATE: "1"}, None)}
    assert found["act_quant"].text.startswith(f"active; drifted in FLUX.2 ({CHANGED}")
    assert found["act_quant"].level == "note"
    assert found["qk_norm_rope"].text.startswith(f"drifted ({CHANGED}")
    assert found["qk_norm_rope"].level == "error"
    assert (found["bias_fold"].text, found["bias_fold"].level) == ("active", "ok")


def test_a_port_that_stock_has_made_needless_is_native_and_the_others_stay(release) -> None:
    feature: Feature = dataclasses.replace(
        WITH_PORTS,
        ports=(port("A", sites=(), relies_on=(), native_since="0.5.17"), port("B", sites=(), relies_on=())),
    )
    record = make_plan(ON, release, H200, [feature]).records[feature.id]
    assert record.state is State.ACTIVE
    assert record.out == {feature.ports[0]: (State.NATIVE, "stock does it since 0.5.17")}
    needless = dataclasses.replace(feature, ports=feature.ports[:1])
    record = make_plan(ON, release, H200, [needless]).records[feature.id]
    assert (record.state, record.reason) == (State.NATIVE, "stock does it since 0.5.17")
