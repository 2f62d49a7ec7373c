"""Packaging: maps the repository's folders into one package and ships the start-up file.

`kernels/`, `loaders/` and `patches/` lie beside `sglang_fastpath/` in the repository and inside it once
installed; they carry no `__init__.py`, so that Hugging Face's package `kernels` is never shadowed.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("kernels", "loaders", "patches")
STARTUP_FILE = "sglang_fastpath.pth"


def packages() -> dict[str, str]:
    """Import name -> folder, for the package and everything that is mapped below it."""
    mapping = {"sglang_fastpath": "sglang_fastpath"}
    for folder in FOLDERS:
        for package in [folder, *(f"{folder}.{sub}" for sub in find_namespace_packages(folder))]:
            mapping[f"sglang_fastpath.{package}"] = package.replace(".", "/")
    return mapping


class BuildWithStartupFile(build_py):
    """Adds `sglang_fastpath.pth` beside the package, in wheels and in editable installs alike.

    SGLang before 0.5.21 loads no plugin in `sglang generate` or `DiffGenerator`; a `.pth` file is the one
    place from which an installed package can get there. It does nothing unless asked (see startup.py).
    """

    def run(self) -> None:
        super().run()
        target = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(STARTUP_FILE, str(Path(target) / STARTUP_FILE))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), STARTUP_FILE]


setup(
    name="sglang-fastpath",
    version="0.1.0",
    description="Makes an unmodified SGLang faster without changing a bit of its output",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    install_requires=["packaging", "psutil", "rich", "safetensors>=0.8", "torch", "typer", "wrapt"],
    extras_require={
        "sglang": ["sglang[diffusion]>=0.5.11,<=0.5.23"],
        "test": ["hypothesis", "mypy", "pytest", "pytest-xdist", "ruff"],
    },
    packages=list(packages()),
    package_dir=packages(),
    package_data={
        "sglang_fastpath": ["contracts.json", "py.typed"],
        "sglang_fastpath.kernels": ["*.cu", "*.cuh"],
    },
    cmdclass={"build_py": BuildWithStartupFile},
    entry_points={
        "console_scripts": ["sglang-fastpath = sglang_fastpath.cli:main"],
        "sglang.srt.plugins": ["fastpath = sglang_fastpath.plugin:register"],
        "sglang.multimodal_gen.plugins": ["fastpath = sglang_fastpath.plugin:register"],
    },
)
