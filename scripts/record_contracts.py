"""Writes `sglang_fastpath/contracts.json`: fingerprints of the catalogue's targets, from SGLang's own wheels.

    python scripts/record_contracts.py [--check] [--releases DIR] [VERSION ...]

Without versions, every release that is recorded already; name one to add it. A release is read from the
tree `DIR/VERSION/sglang` if there is one, else from the wheel that pip downloads. `--check` writes nothing
and exits with 1 if the file is not what these sources give.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources.abc import Traversable
from pathlib import Path

from sglang_fastpath.contracts import CONTRACTS_FILE, measure
from sglang_fastpath.features import contract_targets

Records = dict[str, dict[str, str | None]]


def package_folder(version: str, releases: Path | None, downloads: Path) -> Traversable:
    """The folder `sglang` of a release: under `releases`, or inside a wheel fetched into `downloads`."""
    if releases and (releases / version / "sglang").is_dir():
        return releases / version / "sglang"
    folder = downloads / version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", "sglang", "--dest", str(folder), f"sglang=={version}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"sglang {version}: pip could not download the wheel")
    (wheel,) = folder.glob("sglang-*.whl")
    return zipfile.Path(wheel, "sglang/")


def record(versions: Sequence[str], targets: Sequence[str], releases: Path | None) -> Records:
    """Version -> target -> fingerprint, or None where the release has no such target."""
    records: Records = {}
    with tempfile.TemporaryDirectory() as downloads, ThreadPoolExecutor(max_workers=4) as pool:
        folders = pool.map(lambda version: package_folder(version, releases, Path(downloads)), versions)
        for version, folder in zip(versions, folders, strict=True):
            records[version] = {target: measure(target, folder) for target in targets}
            found = sum(fingerprint is not None for fingerprint in records[version].values())
            print(f"sglang {version}: {found} of {len(targets)} targets exist", flush=True)
    return records


def in_release_order(records: Records) -> Records:
    """0.5.12, 0.5.12.post1, 0.5.13: as the numbers say; targets by name."""
    versions = sorted(records, key=lambda version: [int(number) for number in re.findall(r"\d+", version)])
    return {version: dict(sorted(records[version].items())) for version in versions}


def main() -> int:
    parser = argparse.ArgumentParser(description="Records the fingerprints of stock SGLang functions.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: all that are recorded already")
    parser.add_argument("--releases", type=Path, metavar="DIR", help="unpacked releases: DIR/VERSION/sglang")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 on a difference")
    arguments = parser.parse_args()

    written = CONTRACTS_FILE.read_text() if CONTRACTS_FILE.is_file() else '{"releases": {}}'
    old: Records = json.loads(written)["releases"]
    new = record(arguments.versions or list(old), contract_targets(), arguments.releases)
    text = json.dumps({"releases": in_release_order(old | new)}, indent=1) + "\n"
    if not arguments.check:
        CONTRACTS_FILE.write_text(text)
    elif text != written:
        differing = ", ".join(version for version in new if new[version] != old.get(version)) or "layout only"
        print(f"{CONTRACTS_FILE.name} is not what these sources give ({differing})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
