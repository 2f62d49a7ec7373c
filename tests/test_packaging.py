"""Packaging: what a wheel holds, how it is imported, and that the start-up file keeps still unless asked."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_fastpath.features import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))  # the dependencies, and the editable installation

# Where a file lies once installed -> where it lies in the checkout.
SOURCES = {
    f"sglang_fastpath/{file.name}": file for file in (ROOT / "sglang_fastpath").iterdir() if file.is_file()
} | {
    f"sglang_fastpath/{file.relative_to(ROOT)}": file
    for folder in ("kernels", "loaders", "patches")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".py", ".cu", ".cuh")
}
CUDA = {name for name in SOURCES if name.endswith((".cu", ".cuh"))}
CORE = sorted(f"sglang_fastpath.{file.stem}" for file in (ROOT / "sglang_fastpath").glob("[!_]*.py"))
MAPPED = sorted(
    name.removesuffix(".py").replace("/", ".") for name in SOURCES if name.count("/") > 1 and name.endswith(".py")
)


@dataclass(frozen=True)
class Installation:
    """An interpreter that has the package, and the folder that the package was installed into."""

    python: Path
    site_packages: Path

    @property
    def distribution(self) -> metadata.Distribution:
        (found,) = metadata.distributions(name="sglang-fastpath", path=[str(self.site_packages)])
        return found

    def run(self, program: str, *arguments: str, cwd: Path, **environment: str) -> Any:
        """Runs a program that prints JSON."""
        done = subprocess.run(
            [self.python, "-c", program, *arguments],
            env=os.environ | environment,
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, which building would litter."""
    folder = tmp_path_factory.mktemp("wheel")
    litter = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder / "checkout", ignore=litter)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "checkout")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel in an environment of its own, which finds its dependencies in the one of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    # A folder named in a .pth file comes last on the path, and its own .pth files are not run: the editable
    # installation in there stays asleep. The name sorts before sglang_fastpath.pth, which needs wrapt.
    (site_packages / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    return Installation(python, site_packages)


@pytest.fixture(params=["installed", "editable"])
def installation(request: pytest.FixtureRequest) -> Installation:
    if request.param == "installed":
        wheel_installed: Installation = request.getfixturevalue("installed")
        return wheel_installed
    editable = Installation(Path(sys.executable), SITE_PACKAGES)
    origin = json.loads(editable.distribution.read_text("direct_url.json") or "{}")
    assert origin.get("dir_info") == {"editable": True}, f"install it with: {sys.executable} -m pip install -e ."
    return editable


# The wheel


def test_the_wheel_holds_the_package_and_the_start_up_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        held = {name: archive.read(name) for name in names}
    expected = SOURCES | {"sglang_fastpath.pth": ROOT / "sglang_fastpath.pth"}
    assert held.keys() == expected.keys()
    assert held == {name: file.read_bytes() for name, file in expected.items()}
    assert {
        "sglang_fastpath/contracts.json",
        "sglang_fastpath/py.typed",
        "sglang_fastpath/kernels/fused_kernels.cu",
    } < (held.keys())


def test_entry_points(installation: Installation) -> None:
    assert {(entry.group, entry.name, entry.value) for entry in installation.distribution.entry_points} == {
        ("console_scripts", "sglang-fastpath", "sglang_fastpath.cli:main"),
        ("sglang.srt.plugins", "fastpath", "sglang_fastpath.plugin:register"),
        ("sglang.multimodal_gen.plugins", "fastpath", "sglang_fastpath.plugin:register"),
    }


def test_uninstalling_removes_the_start_up_file(installation: Installation) -> None:
    assert "sglang_fastpath.pth" in {str(file) for file in installation.distribution.files or ()}
    assert (installation.site_packages / "sglang_fastpath.pth").is_file()


def test_the_console_script(installation: Installation, tmp_path: Path) -> None:
    script = installation.python.with_name("sglang-fastpath")
    done = subprocess.run([script, "features", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [feature["id"] for feature in json.loads(done.stdout)] == [feature.id for feature in CATALOGUE]


# Imports


@pytest.mark.parametrize("inside_checkout", [True, False], ids=["inside", "outside"])
def test_the_four_ways_to_import(installation: Installation, inside_checkout: bool, tmp_path: Path) -> None:
    program = (
        "import importlib, json, sys; "
        "print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))"
    )
    cwd = ROOT if inside_checkout else tmp_path
    # Hugging Face's package last: nothing of ours may have taken its place by then.
    files = installation.run(program, "sglang_fastpath", *CORE, *MAPPED, "kernels", cwd=cwd)
    hugging_face = files.pop("kernels")
    assert hugging_face and Path(hugging_face) == SITE_PACKAGES / "kernels/__init__.py"
    from_checkout = inside_checkout or installation.site_packages == SITE_PACKAGES
    for name, file in files.items():
        relative = name.replace(".", "/") + ("/__init__.py" if name == "sglang_fastpath" else ".py")
        assert Path(file) == (SOURCES[relative] if from_checkout else installation.site_packages / relative)


def test_the_cuda_sources_lie_where_the_build_looks_for_them(installation: Installation, tmp_path: Path) -> None:
    program = (
        "import json; from sglang_fastpath.kernels import fused_kernels, llm_kernels; "
        "folder, names = fused_kernels.source_folder(), {*fused_kernels._SOURCES, *llm_kernels._SOURCES}; "
        "print(json.dumps([[name, (folder / name).is_file()] for name in names]))"
    )
    found = installation.run(program, cwd=tmp_path)
    assert {(f"sglang_fastpath/kernels/{name}", there) for name, there in found} == {(name, True) for name in CUDA}


LOADED = "print(json.dumps(sorted(sys.modules)))"


def top_level(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_the_core_imports_neither_sglang_nor_triton(installation: Installation, tmp_path: Path) -> None:
    program = f"import importlib, json, sys; [importlib.import_module(name) for name in sys.argv[1:]]; {LOADED}"
    loaded = installation.run(program, *CORE, cwd=tmp_path)
    assert set(CORE) < set(loaded)
    assert top_level(loaded).isdisjoint({"sglang", "triton"})


@pytest.mark.parametrize("module", ["sglang_fastpath.plugin", "sglang_fastpath.cli"])
def test_the_plugin_and_the_command_line_start_without_torch(
    module: str, installation: Installation, tmp_path: Path
) -> None:
    loaded = installation.run(f"import json, sys, {module}; {LOADED}", cwd=tmp_path)
    assert module in loaded
    assert top_level(loaded).isdisjoint({"sglang", "triton", "torch"})


# The start-up file


@pytest.mark.parametrize("arguments", [(), ("--plugins", "fastpath"), ("fastpath",)], ids=" ".join)
def test_an_interpreter_that_is_not_asked_imports_nothing(
    arguments: tuple[str, ...], installation: Installation, tmp_path: Path
) -> None:
    loaded = installation.run(f"import json, sys; {LOADED}", *arguments, cwd=tmp_path)
    assert top_level(loaded).isdisjoint({"sglang_fastpath", "wrapt"})


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ((), {"SGLANG_FASTPATH": "1"}),
        ((), {"SGLANG_FASTPATH_EMULATE": "1"}),
        (("--plugin", "fastpath"), {}),
        (("--plugin=fastpath",), {}),
    ],
    ids=str,
)
def test_a_program_without_sglang_pays_for_one_small_module(
    arguments: tuple[str, ...], environment: dict[str, str], installation: Installation, tmp_path: Path
) -> None:
    program = f"import json, sys; {LOADED}"
    before = installation.run(program, cwd=tmp_path)
    added = set(installation.run(program, *arguments, cwd=tmp_path, **environment)) - set(before)
    assert {module for module in added if module.startswith("sglang_fastpath")} == {
        "sglang_fastpath",
        "sglang_fastpath.startup",
    }
    assert top_level([*added]) - sys.stdlib_module_names == {"sglang_fastpath", "wrapt"}


def test_importing_sglang_then_loads_the_plugin(installation: Installation, tmp_path: Path) -> None:
    program = (
        "import json, sglang; from sglang_fastpath import plan; current = plan.current(); "
        "print(json.dumps([current and current.release, sglang.__version__]))"
    )
    release, version = installation.run(program, cwd=tmp_path, SGLANG_FASTPATH="1")
    assert release == version
