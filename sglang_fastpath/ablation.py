"""The ablation: SGLang's whole engine on one prompt, stock and with features switched, images compared as bytes.

Every variant is a `sglang generate` of its own, workers spawned as in production, told apart by the command line
and the environment alone; what its processes did is read from the status files that they wrote.
"""

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_fastpath import envs, status
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.plan import State
from sglang_fastpath.status import ProcessStatus


class AblationError(RuntimeError):
    """A variant did not produce an image; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Variant:
    """One run: `plugin` adds `--plugin fastpath`, `switches` sets feature variables."""

    name: str
    plugin: bool
    switches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What one variant gave: the image, its equality with stock's bytes, and what its workers said."""

    variant: Variant
    image: Path
    identical: bool
    workers: list[ProcessStatus]


STOCK = Variant("stock", plugin=False)
EVERYTHING = Variant("fastpath", plugin=True)


def with_features(workers: list[ProcessStatus], wanted: Collection[str] | None = None) -> Iterator[Variant]:
    """Each feature off alone, and (if there are several) each on alone.

    `workers`: what those of `EVERYTHING` said; a feature that none of them could use, in this model or on this
    machine, is left out. So is one that is not among those `wanted`, by id, unless that is None.
    """
    states = [worker.document["features"] for worker in workers]
    out = {State.OFF, State.UNSUPPORTED}
    features = [f for f in CATALOGUE if not states or any(s.get(f.id, {}).get("state") not in out for s in states)]
    features = [feature for feature in features if wanted is None or feature.id in wanted]
    for feature in features:
        yield Variant(f"without {feature.id}", plugin=True, switches={feature.env: "0"})
    for feature in features if len(features) > 1 else ():
        yield Variant(f"only {feature.id}", plugin=True, switches={envs.ONLY: feature.id})


def run(variant: Variant, arguments: list[str], folder: Path, *, emulate: bool) -> Outcome:
    """Generates one image with `sglang generate ARGUMENTS` and compares it with `folder/stock.png`.

    Raises:
        AblationError: if SGLang fails or writes no image.
    """
    name = variant.name.replace(" ", "-")
    image, log, status_dir = folder / f"{name}.png", folder / f"{name}.log", folder / f"{name}.status"
    image.unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("sglang")), "generate", *arguments]
    command += ["--output-path", str(folder), "--output-file-name", image.name]
    if variant.plugin:
        command += ["--plugin", "fastpath"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(envs.PREFIX)}
    environ |= {**variant.switches, envs.STATUS_DIR: str(status_dir)}
    if emulate:
        environ[envs.EMULATE] = "1"
    for old in status_dir.glob("*"):
        old.unlink()
    with log.open("w") as file:
        returned = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT, check=False)
    if returned.returncode or not image.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise AblationError(f"`{' '.join(command)}` ended with {returned.returncode} and no image:\n{tail}")
    processes = status.read(status_dir, all_processes=True)
    return Outcome(
        variant,
        image,
        identical=image.read_bytes() == (folder / "stock.png").read_bytes(),
        workers=[process for process in processes if "worker" in process.document["role"]],
    )
