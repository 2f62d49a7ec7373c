"""Every environment variable of the plugin: name, values, default, meaning; unknown ones are errors.

Settings travel to spawned workers through the environment, which is why there is no other configuration.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_fastpath.features import BY_ID, CATALOGUE

PREFIX = "SGLANG_FASTPATH"
ENABLE = PREFIX
ONLY = f"{PREFIX}_ONLY"
PARITY = f"{PREFIX}_PARITY"
GUARD = f"{PREFIX}_GUARD"
STRICT = f"{PREFIX}_STRICT"
EMULATE = f"{PREFIX}_EMULATE"
STATUS_DIR = f"{PREFIX}_STATUS_DIR"
GRAPHS = f"{PREFIX}_GRAPHS"
GRAPH_BYTES = f"{PREFIX}_GRAPH_BYTES"


class ConfigurationError(ValueError):
    """A setting that cannot be used; the message names it, its value and what to do."""


@dataclass(frozen=True)
class Variable:
    """One environment variable, for the error messages and the tables in docs and `sglang-fastpath env`."""

    name: str
    values: str
    default: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(ENABLE, "0, 1", "0", "the plugin itself; `--plugin fastpath` sets it to 1"),
    *(Variable(f.env, ", ".join(f.choices), "1" if f.measured else "0", f.title) for f in CATALOGUE),
    Variable(ONLY, "ids, comma-separated", "", "every feature not named is off, unless its own variable is 1"),
    Variable(PARITY, "bitwise, ulp", "bitwise", "whether features that are not bit-exact may run"),
    Variable(GUARD, "once, sample:N, always, off", "once", "how often a fast path is checked against stock"),
    Variable(STRICT, "0, 1", "0", "1: refuse to start if a feature that is not switched off cannot run"),
    Variable(
        GRAPHS, "a number from 1", "8", "how many captured passes step_graph keeps; the least recently used goes"
    ),
    Variable(GRAPH_BYTES, "bytes", str(8 << 30), "the most device memory that step_graph's graphs may hold together"),
    Variable(EMULATE, "0, 1", "0", "1: emulate the FP8 linear in torch, on a machine without a GPU"),
    Variable(STATUS_DIR, "a folder", "", "where processes write their status; default: the user's state folder"),
)
_NAMES = {variable.name for variable in VARIABLES}


@dataclass(frozen=True)
class Settings:
    """The validated settings of one process."""

    enabled: bool = False
    only: frozenset[str] = frozenset()
    switches: Mapping[str, bool] = field(default_factory=dict)
    parity: Literal["bitwise", "ulp"] = "bitwise"
    guard: str = "once"
    strict: bool = False
    emulate: bool = False
    status_dir: Path = Path()
    cache_dir: Path = Path()
    every_gemm_backend: bool = False
    """Whether gemm_tuner takes backends of which no gain has been recorded on this architecture."""
    graphs: int = 8
    graph_bytes: int = 8 << 30

    def off_because(self, feature_id: str) -> str | None:
        """Which setting switches the feature off, or None if none does."""
        feature = BY_ID[feature_id]
        if feature_id in self.switches:
            return None if self.switches[feature_id] else f"{feature.env}=0"
        if self.only and feature_id not in self.only:
            return f"not in {ONLY}"
        if not self.only and feature.default_off:
            return feature.default_off
        if feature.parity == "ulp" and self.parity == "bitwise":
            return f"not bit-exact: {PARITY}=ulp allows it"
        return None


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads and validates every `SGLANG_FASTPATH*` variable.

    Raises:
        ConfigurationError: for an unknown name (the nearest known one is named) or a value out of range.
    """
    for name in environ:
        if name.startswith(PREFIX) and name not in _NAMES:
            nearest = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0)[0]
            raise ConfigurationError(
                f"{name} is not a variable of sglang-fastpath. Did you mean {nearest}? "
                "`sglang-fastpath env` lists them all."
            )
    only = frozenset(part.strip() for part in environ.get(ONLY, "").split(",") if part.strip())
    for feature_id in sorted(only - BY_ID.keys()):
        nearest = difflib.get_close_matches(feature_id, BY_ID, n=1, cutoff=0)[0]
        raise ConfigurationError(f"{ONLY} names {feature_id!r}, which is no feature. Did you mean {nearest!r}?")
    status_dir = environ.get(STATUS_DIR, "")
    return Settings(
        enabled=_flag(environ, ENABLE, default=False),
        only=only,
        switches={f.id: _choice(environ, f.env, f.choices) != "0" for f in CATALOGUE if f.env in environ},
        parity="ulp" if _choice(environ, PARITY, ("bitwise", "ulp")) == "ulp" else "bitwise",
        guard=_guard_policy(environ),
        strict=_flag(environ, STRICT, default=False),
        emulate=_flag(environ, EMULATE, default=False),
        status_dir=Path(status_dir)
        if status_dir
        else _own_folder(environ, "XDG_STATE_HOME", ".local/state") / "status",
        cache_dir=_own_folder(environ, "XDG_CACHE_HOME", ".cache"),
        every_gemm_backend=environ.get(BY_ID["gemm_tuner"].env) == "all",
        graphs=_number(environ, GRAPHS, least=1),
        graph_bytes=_number(environ, GRAPH_BYTES, least=0),
    )


def _own_folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """This plugin's part of one of the user's folders."""
    base = environ.get(variable, "")
    return (Path(base) if base else Path.home() / default) / "sglang-fastpath"


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    return _choice(environ, name, ("0", "1"), "1" if default else "0") == "1"


def _choice(environ: Mapping[str, str], name: str, values: tuple[str, ...], default: str = "") -> str:
    value = environ.get(name, default or values[0])
    if value not in values:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(values)}.")
    return value


def _number(environ: Mapping[str, str], name: str, *, least: int) -> int:
    default = next(variable.default for variable in VARIABLES if variable.name == name)
    value = environ.get(name, "") or default
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise ConfigurationError(f"{name}={value!r} is not a whole number from {least}.")
    return int(value)


def _guard_policy(environ: Mapping[str, str]) -> str:
    from sglang_fastpath.guard import GuardPolicy

    value = environ.get(GUARD, "once")
    try:
        GuardPolicy.parse(value)
    except ValueError as error:
        raise ConfigurationError(f"{GUARD}={value!r}: {error}") from None
    return value
