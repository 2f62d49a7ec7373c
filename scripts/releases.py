"""Unpacks SGLang releases into `.releases/VERSION/`, beside the one set of dependencies in the environment.

    python scripts/releases.py [VERSION ...]

With `PYTHONPATH=.releases/VERSION`, Python imports that release over the dependencies already installed:
the release matrix of the tests. What is there already is skipped. A release appears under its name only
once it is complete, so that neither an interrupted nor a parallel run does harm.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MATRIX = ("0.5.11", "0.5.17", "0.5.19", "0.5.21", "0.5.23")
FOLDER = Path(__file__).resolve().parent.parent / ".releases"


def unpack(version: str, folder: Path) -> None:
    """Puts the release at `folder/version` unless it is there, and says so.

    Raises RuntimeError with pip's own words if pip fails.
    """
    target = folder / version
    if target.is_dir():
        print(f"sglang {version}: already in {target}", flush=True)
        return
    print(f"sglang {version}: fetching", flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=folder) as scratch:
        tree = Path(scratch, "tree")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-compile", "--only-binary", "sglang"]
        command += ["--target", str(tree), f"sglang=={version}"]
        pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if pip.returncode:
            raise RuntimeError(f"sglang {version}: pip failed\n{pip.stdout.strip()}")
        try:
            tree.rename(target)
        except OSError:
            if not target.is_dir():  # another run was not faster: a real failure
                raise
    print(f"sglang {version}: unpacked into {target}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Unpacks SGLang releases into .releases/VERSION/.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=MATRIX)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with ThreadPoolExecutor(max_workers=4) as pool:
        for job in [pool.submit(unpack, version, arguments.folder) for version in arguments.versions]:
            try:
                job.result()
            except (RuntimeError, OSError) as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
