"""The release matrix: what the plugin is on each SGLang release, found out in a process of that release."""

import ast
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_fastpath import server_route
from sglang_fastpath.features import BY_ID, CATALOGUE

pytestmark = pytest.mark.releases

ROOT = Path(__file__).resolve().parent.parent
PROBE = Path(__file__).with_name("release_probe.py")
MATRIX: tuple[str, ...] = runpy.run_path(str(ROOT / "scripts/releases.py"))["MATRIX"]

ACTIVE = ["active", ""]
NATIVE = ["native", "stock does it since 0.5.19"]
NO_GPU = ["unsupported", "no NVIDIA GPU: torch.cuda.is_available() is False"]
BLOCK = tuple(
    feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.qwen_image_block")
)
EMULATED_GPU = ["off", "SGLANG_FASTPATH_EMULATE=1 emulates arithmetic, not a GPU"]
NEEDS_A_GPU = dict.fromkeys(("gemm_tuner", "step_graph"), EMULATED_GPU)
NOT_MEASURED = {feature.id: ["off", feature.default_off] for feature in CATALOGUE if not feature.measured}
FLUX2_ALONE = dict.fromkeys(("gated_residual_norm", "qk_norm_rope"), ACTIVE)
ALIKE = {**dict.fromkeys(BLOCK, ACTIVE), **FLUX2_ALONE, **NEEDS_A_GPU, **NOT_MEASURED}
# With the FP8 linear emulated.
STATES = {
    "0.5.11": {"cfg_mod_cache": ACTIVE, **ALIKE},
    "0.5.17": {"cfg_mod_cache": ACTIVE, **ALIKE},
    "0.5.19": {"cfg_mod_cache": NATIVE, **ALIKE},
    "0.5.21": {"cfg_mod_cache": NATIVE, **ALIKE},
    "0.5.23": {"cfg_mod_cache": NATIVE, **ALIKE},
}
# What must serve every block of Qwen-Image in block FP8. 0.5.11 leaves its QKV and MLP linears in bf16; from 0.5.20
# on a CPU stock rotates q and k by complex tables, which only GPUs spare it.
SERVING = {
    "0.5.11": set(),
    "0.5.17": set(BLOCK),
    "0.5.19": set(BLOCK),
    "0.5.21": set(BLOCK) - {"qkv_epilogue"},
    "0.5.23": set(BLOCK) - {"qkv_epilogue"},
}
# By the kind of FLUX.2's blocks, what has a step there. 0.5.11 quantizes their linears, too; the complex tables are
# Qwen-Image's.
FLUX2_BLOCKS = {
    "transformer_blocks": {"scale_prepack", "norm_quant", "gated_residual_norm", "qkv_epilogue", "act_quant"},
    "single_transformer_blocks": {"norm_quant", "gated_residual_norm", "qk_norm_rope", "act_quant"},
}
FLUX2 = tuple(
    feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.flux2_blocks")
)
ROTATED_BY_STOCK = {"qkv_epilogue", "qk_norm_rope"}
FLUX2_SERVING = {
    version: set(FLUX2) - (ROTATED_BY_STOCK if version in ("0.5.21", "0.5.23") else set()) for version in MATRIX
}
BF16, BLOCK_FP8, FLUX2_BF16, FLUX2_FP8 = "bf16", "block FP8", "FLUX.2 bf16", "FLUX.2 block FP8"

LAUNCHER = "sglang.multimodal_gen.runtime.launch_server"
CLIENT = "sglang.multimodal_gen.runtime.scheduler_client:AsyncSchedulerClient"
READINESS = "sglang.multimodal_gen.runtime.managers.scheduler:Scheduler.event_loop"
EMULATION = {
    f"sglang.{path}.layers.quantization.fp8:dispatch_w8a8_block_fp8_linear"
    for path in ("multimodal_gen.runtime", "srt")
}
PROCESS_TARGETS = {f"{LAUNCHER}:run_scheduler_process", f"{LAUNCHER}:_run_disagg_role_process"}
ROUTE = {f"{module}:create_app" for module in (server_route.CREATE_APP.partition(":")[0], LAUNCHER)}
SEAMS = {READINESS, f"{CLIENT}.initialize", f"{CLIENT}.forward"} | ROUTE
SEAMS_UNTIL_0_5_20 = SEAMS | PROCESS_TARGETS

# In the contracts of cfg_mod_cache and step_graph alone.
ALTERED = "sglang.multimodal_gen.runtime.models.dits.qwen_image:QwenTimestepProjEmbeddings.forward"
ALTERED_0_5_17, UNRECORDED_0_5_24, NOT_ASKED_0_5_17 = "altered 0.5.17", "0.5.24", "0.5.17, not asked for"
NOT_EMULATED_0_5_17 = "0.5.17, not emulated"
SETTINGS = {NOT_ASKED_0_5_17: [], NOT_EMULATED_0_5_17: ["SGLANG_FASTPATH=1"]}
EMULATED = ["SGLANG_FASTPATH=1", "SGLANG_FASTPATH_EMULATE=1"]

# What tests/release_probe.py describes.
Report = dict[str, Any]


def unpacked(version: str) -> Path:
    tree = ROOT / ".releases" / version
    assert (tree / "sglang").is_dir(), f"SGLang {version} is not in {tree}: run python scripts/releases.py"
    return tree


def copy_with(tree: Path, copy: Path, changed: str, edit: Callable[[str], str]) -> Path:
    """A copy of a release made of links, but for one file that is edited."""
    original = tree
    for part in Path(changed).parts:
        copy.mkdir()
        for entry in original.iterdir():
            if entry.name not in (part, "__pycache__"):
                (copy / entry.name).symlink_to(entry)
        original, copy = original / part, copy / part
    text = original.read_text()
    assert edit(text) != text
    copy.write_text(edit(text))
    return copy.parents[len(Path(changed).parts) - 1]


def add_statement(source: str) -> str:
    """A release's file with the contract function ALTERED one statement longer, doing what it did."""
    tree = node = ast.parse(source)
    for name in ALTERED.partition(":")[2].split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == name)  # type: ignore[assignment]
    node.body.append(ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree))


def run_probe(tree: Path, folder: Path, *settings: str) -> Report:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_FASTPATH")}
    environment |= {
        "PYTHONPATH": str(tree),
        "XDG_STATE_HOME": str(folder),
        # Of SGLang's dependencies, one brings a plugin of its own: what changes here is to be ours.
        "SGLANG_PLUGINS": "fastpath",
    }
    command = [sys.executable, str(PROBE), str(folder / "report.json"), *settings]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{tree.name}:\n{done.stderr[-8000:]}"
    report: Report = json.loads((folder / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Report]]:
    """The report on a release, or on one of the four special cases. All are probed, two at a time."""
    folder = tmp_path_factory.mktemp("releases")
    qwen_image = f"{ALTERED.partition(':')[0].replace('.', '/')}.py"
    trees = {version: unpacked(version) for version in MATRIX}
    trees[ALTERED_0_5_17] = copy_with(trees["0.5.17"], folder / "altered", qwen_image, add_statement)
    trees[UNRECORDED_0_5_24] = copy_with(
        trees["0.5.23"], folder / "newer", "sglang/_version.py", lambda text: text.replace("0.5.23", "0.5.24")
    )
    trees[NOT_ASKED_0_5_17] = trees[NOT_EMULATED_0_5_17] = trees["0.5.17"]
    with ThreadPoolExecutor(max_workers=2) as pool:
        reports: dict[str, Future[Report]] = {}
        for name, tree in trees.items():
            reports[name] = pool.submit(run_probe, tree, folder / f"probe {name}", *SETTINGS.get(name, EMULATED))
        yield lambda name: reports[name].result()
        pool.shutdown(cancel_futures=True)


def active_sites(states: dict[str, list[str]]) -> set[str]:
    return {site for id, state in states.items() if state == ACTIVE for site in BY_ID[id].sites}


def assert_stock_serves(report: Report) -> None:
    """The plugin is there and serves nothing, in the parent and in a worker."""
    assert set(report["changed"]) <= SEAMS_UNTIL_0_5_20 | EMULATION
    assert report["left_behind"] == report["worker"]["replaced"] == []
    assert report["worker"]["states"] == report["states"]
    assert report["stock"] == report["plugged"]
    assert not any(count for hits in report["hits"].values() for count in hits.values())


@pytest.mark.parametrize("version", MATRIX)
def test_sglang_loads_the_plugin_and_the_plan_is_the_recorded_one(
    version: str, probed: Callable[[str], Report]
) -> None:
    report = probed(version)
    assert report["release"] == [version, str(unpacked(version) / "sglang")]
    assert not report["startup_file_ran"]  # so that the entry points alone did it
    assert report["states"] == STATES[version]


@pytest.mark.parametrize("version", MATRIX)
def test_a_spawned_worker_has_the_plugin(version: str, probed: Callable[[str], Report]) -> None:
    worker = probed(version)["worker"]
    assert not worker["startup_file_ran"]
    assert worker["states"] == STATES[version]
    assert set(worker["replaced"]) == active_sites(STATES[version])


@pytest.mark.parametrize("denoiser", [BF16, BLOCK_FP8, FLUX2_BF16, FLUX2_FP8])
@pytest.mark.parametrize("version", MATRIX)
def test_denoising_gives_stocks_bytes(version: str, denoiser: str, probed: Callable[[str], Report]) -> None:
    report = probed(version)
    stock = report["stock"][denoiser]
    assert report["plugged"][denoiser] == report["unplugged"][denoiser] == stock
    assert len(set(stock)) == len(stock) > 1


@pytest.mark.parametrize("version", MATRIX)
def test_the_second_pass_reuses_the_modulation(version: str, probed: Callable[[str], Report]) -> None:
    report = probed(version)
    active = STATES[version]["cfg_mod_cache"] == ACTIVE
    # In block FP8 the guard's checks call the modulation again, which is reused each time.
    assert report["hits"][BF16]["cfg_mod_cache"] == (report["modulation_calls"] if active else 0)
    assert report["hits"][FLUX2_BF16]["cfg_mod_cache"] == 0, "it has no second pass"
    assert (report["hits"][BLOCK_FP8]["cfg_mod_cache"] >= report["modulation_calls"]) is active
    assert all(fallbacks["cfg_mod_cache"] == {} for fallbacks in report["fallbacks"].values())


@pytest.mark.parametrize("version", MATRIX)
def test_the_fused_block_serves_every_block_in_block_fp8_and_says_what_it_leaves_to_stock(
    version: str, probed: Callable[[str], Report]
) -> None:
    report = probed(version)
    (calls,) = report["block_calls"][BLOCK_FP8].values()
    assert report["failed"] == []
    for id in BLOCK:
        hits, fallbacks = report["hits"][BLOCK_FP8][id], report["fallbacks"][BLOCK_FP8][id]
        if id in SERVING[version]:
            assert (hits, fallbacks) == (calls, {})
        else:
            assert fallbacks and all(fallbacks), "neither served nor refused"
        assert report["hits"][BF16][id] == 0
        assert sum(report["fallbacks"][BF16][id].values()) == calls
    if version == "0.5.11":
        refusal = {"attn.add_q_proj is not in block FP8 (UnquantizedLinearMethod)": calls}
        assert [report["fallbacks"][BLOCK_FP8][id] for id in BLOCK] == [refusal] * len(BLOCK)


def flux2_calls(report: Report, id: str) -> int:
    """How many blocks of a run of FLUX.2 have a step for the feature."""
    calls = report["block_calls"][FLUX2_FP8]
    return sum(calls[kind] for kind, ids in FLUX2_BLOCKS.items() if id in ids)


@pytest.mark.parametrize("version", MATRIX)
def test_flux2s_fused_blocks_serve_every_block_in_block_fp8_and_say_what_they_leave_to_stock(
    version: str, probed: Callable[[str], Report]
) -> None:
    report = probed(version)
    assert set(FLUX2) == set().union(*FLUX2_BLOCKS.values())
    in_bf16 = {
        kind: f"{linear} is not in block FP8 (UnquantizedLinearMethod)"
        for kind, linear in zip(FLUX2_BLOCKS, ("attn.add_q_proj", "attn.to_qkv_mlp_proj"), strict=True)
    }
    for id in FLUX2:
        hits, fallbacks = report["hits"][FLUX2_FP8][id], report["fallbacks"][FLUX2_FP8][id]
        calls = flux2_calls(report, id)
        if id in FLUX2_SERVING[version]:
            assert (hits, fallbacks) == (calls, {})
        else:
            assert (hits, fallbacks) == (0, {"stock rotates q and k by complex tables on a CPU": calls})
        assert report["hits"][FLUX2_BF16][id] == 0
        assert report["fallbacks"][FLUX2_BF16][id] == {
            in_bf16[kind]: report["block_calls"][FLUX2_BF16][kind] for kind, ids in FLUX2_BLOCKS.items() if id in ids
        }
    for id in BY_ID.keys() - set(FLUX2):
        assert report["hits"][FLUX2_FP8][id] == report["hits"][FLUX2_BF16][id] == 0


@pytest.mark.parametrize("version", MATRIX)
def test_a_sum_that_stock_leaves_to_the_next_block_is_taken_by_a_fused_one(
    version: str, probed: Callable[[str], Report]
) -> None:
    """(residual, x, gate), from 0.5.19: both streams between double blocks, one between single ones."""
    report = probed(version)
    pending, doubles = report["pending"], report["block_calls"][FLUX2_FP8]["transformer_blocks"] // 2
    assert pending["handed_over"] == (0 if version in ("0.5.11", "0.5.17") else 3 * doubles)
    assert pending["latents"] == report["stock"][FLUX2_FP8]
    assert {id: pending["hits"][id] for id in FLUX2} == {
        id: flux2_calls(report, id) // 2 if id in FLUX2_SERVING[version] else 0 for id in FLUX2
    }


@pytest.mark.parametrize("version", MATRIX)
def test_nothing_else_of_sglang_changes_and_all_of_it_comes_back(
    version: str, probed: Callable[[str], Report]
) -> None:
    report = probed(version)
    seams = SEAMS_UNTIL_0_5_20 if version in ("0.5.11", "0.5.17", "0.5.19") else SEAMS
    assert set(report["changed"]) == active_sites(STATES[version]) | seams | EMULATION
    assert report["left_behind"] == []


def test_without_gpu_and_emulation_the_fused_block_is_unsupported(probed: Callable[[str], Report]) -> None:
    report = probed(NOT_EMULATED_0_5_17)
    states = {"cfg_mod_cache": ACTIVE} | {id: NO_GPU for id in ALIKE if id not in NOT_MEASURED} | NOT_MEASURED
    assert report["states"] == report["worker"]["states"] == states
    assert set(report["changed"]) == active_sites(states) | SEAMS_UNTIL_0_5_20
    assert report["plugged"] == report["stock"]
    for denoiser in report["hits"].values():
        assert {id: denoiser[id] for id in (*BLOCK, *FLUX2)} == dict.fromkeys((*BLOCK, *FLUX2), 0)


def test_a_changed_function_is_a_drift_that_names_it(probed: Callable[[str], Report]) -> None:
    """For the features that rely on it, and for no other."""
    report = probed(ALTERED_0_5_17)
    assert report["release"][0] == "0.5.17"
    for id in ("cfg_mod_cache", "step_graph"):
        state, reason = report["states"][id]
        assert state == "drifted" and reason.startswith(f"{ALTERED} is changed in this copy of SGLang 0.5.17")
    active = {id: state for id, state in report["states"].items() if state == ACTIVE}
    assert active == dict.fromkeys(BLOCK, ACTIVE) | FLUX2_ALONE
    assert report["worker"]["states"] == report["states"]
    assert set(report["worker"]["replaced"]) == active_sites(report["states"])
    assert report["plugged"] == report["stock"]
    assert report["hits"][BF16]["cfg_mod_cache"] == report["hits"][BLOCK_FP8]["cfg_mod_cache"] == 0


def test_a_newer_release_is_a_drift(probed: Callable[[str], Report]) -> None:
    report = probed(UNRECORDED_0_5_24)
    expected = ["drifted", "release 0.5.24 is not recorded; recorded: 0.5.11 ... 0.5.23"]
    assert report["states"] == {id: expected for id in BY_ID} | NOT_MEASURED
    assert_stock_serves(report)


def test_a_source_tree_without_a_version_is_a_drift(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    program = "from sglang_fastpath import plan; import sglang; print(plan.current().summary('main'))"
    settings = {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "SGLANG_FASTPATH": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "drifted: cfg_mod_cache (release unknown is not recorded" in done.stdout


def test_a_process_that_does_not_ask_for_the_plugin_keeps_stock(probed: Callable[[str], Report]) -> None:
    report = probed(NOT_ASKED_0_5_17)
    assert report["states"] is None and report["changed"] == []
    assert_stock_serves(report)


@pytest.mark.parametrize("version", MATRIX)
def test_every_release_has_the_language_model_servers_seams(version: str) -> None:
    """Read, not imported: its modules want a GPU's libraries in some releases."""
    tree = unpacked(version) / "sglang" / "srt"
    server = ast.parse((tree / "entrypoints" / "http_server.py").read_text())
    applications = [
        node
        for node in server.body
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("app = FastAPI(")
    ]
    assert len(applications) == 1
    scheduler = ast.parse((tree / "managers" / "scheduler.py").read_text())
    (kind,) = (node for node in scheduler.body if isinstance(node, ast.ClassDef) and node.name == "Scheduler")
    methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    assert methods >= {"run_event_loop", "run_batch"}
    assert ("on_idle" in methods) is (version != "0.5.11")
    assert "sglang::scheduler{prefix.replace(' ', '_')}" in (tree / "managers" / "scheduler.py").read_text()


def test_the_guidance_loop_needs_no_import_before_it() -> None:
    """0.5.21 imports in a circle unless its pipelines come first; `bench denoiser` starts as here."""
    program = (
        "from sglang_fastpath.denoisers import build_qwen_image; "
        "from sglang_fastpath.guidance_loop import GuidanceLoop; "
        "print(len(list(GuidanceLoop(build_qwen_image(layers=1), steps=2))))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(unpacked("0.5.21"))}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr


@pytest.mark.parametrize("version", ["0.5.11", "0.5.19", "0.5.23"])
def test_sglang_generate_takes_the_flag_where_sglang_loads_no_plugin_for_it(version: str) -> None:
    """No release loads plugins before it parses `sglang generate`: here the start-up file is the way in."""
    program = "from sglang.cli.main import main; main()"
    returned = subprocess.run(
        [sys.executable, "-c", program, "generate", "--model-path", "qwen-image", "--plugin", "unknown"],
        env={**os.environ, "PYTHONPATH": str(unpacked(version))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert returned.returncode == 2, returned.stderr
    assert returned.stderr.splitlines()[-1].endswith("--plugin unknown: no such plugin; known: fastpath")
