"""Settings, release, machine and catalogue -> one state and one reason per feature.

The plan of the running process is the one global of the plugin: patches count their hits and fallbacks in it,
and the status line, the status file and the parity guard read it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from packaging.version import Version

from sglang_fastpath import contracts
from sglang_fastpath.environment import REQUIREMENTS, Environment, detect
from sglang_fastpath.envs import EMULATE, Settings
from sglang_fastpath.features import CATALOGUE, Feature, Port
from sglang_fastpath.guard import Guard, GuardPolicy, Verdict, tensor_parallel_agreement

_MOST_REASONS = 32

T = TypeVar("T")


class State(StrEnum):
    """The one vocabulary for what became of a feature."""

    ACTIVE = "active"
    OFF = "off"
    NATIVE = "native"
    UNSUPPORTED = "unsupported"
    DRIFTED = "drifted"
    PARITY_FAILED = "parity-failed"
    NEVER_HIT = "never hit"


@dataclass
class FeatureRecord:
    """What became of one feature in this process: its planned state, and what it did since.

    `hits` counts stock calls that were replaced, `fallbacks` stock calls that were not, by reason. `out` says which
    of its ports are not applied, and why: it is active as long as one of them is.
    """

    feature: Feature
    state: State
    reason: str = ""
    hits: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    on_first_hit: Callable[["FeatureRecord"], None] = lambda record: None
    out: dict[Port, tuple[State, str]] = field(default_factory=dict)
    model: str = ""
    """The model that runs in this process, once one of its modules has called a patch."""

    @property
    def ports(self) -> tuple[Port, ...]:
        """The ports that are to be applied, or have been."""
        return tuple(port for port in self.feature.ports if port not in self.out)

    def take_out(self, port: Port, state: State, why: str) -> None:
        """Counts the port out; without another one the feature is out."""
        self.out[port] = state, why
        if not self.ports:
            states = {state for state, _ in self.out.values()}
            self.state = State.DRIFTED if State.DRIFTED in states else state
            reasons = {port.name: why for port, (state, why) in self.out.items() if state is self.state}
            apart = len(set(reasons.values())) > 1
            each = [f"{name}: {why}" if apart else why for name, why in reasons.items()]
            self.reason = "; ".join(dict.fromkeys(each))

    def hit(self, calls: int = 1) -> None:
        """Counts replaced stock calls; the first ones are announced."""
        self.hits += calls
        if self.hits == calls:
            self.on_first_hit(self)

    def fall_back(self, reason: str) -> None:
        """Counts one call left to stock, with the reason; reasons that name values cannot grow without bound."""
        known = reason in self.fallbacks or len(self.fallbacks) < _MOST_REASONS
        self.fallbacks[reason if known else "other reasons"] += 1

    def planned(self) -> tuple[State, str]:
        """The state before any call: what the model that is loaded here lacks is unsupported."""
        if (
            self.state is State.ACTIVE
            and not self.hits
            and self.model
            and (lacking := self.feature.lacks(self.model))
        ):
            return State.UNSUPPORTED, lacking
        return self.state, self.reason

    def observed(self, failed_signatures: Iterable[str] = ()) -> tuple[State, str]:
        """The state as seen from outside: an active feature may have failed its parity or never been hit."""
        if self.state is not State.ACTIVE:
            return self.state, self.reason
        failed = sorted(failed_signatures)
        if failed:
            return State.PARITY_FAILED, "; ".join(failed)
        here = [out for port, out in self.out.items() if self.model in port.models or not (self.model or self.hits)]
        if here:
            return here[0]
        if not self.hits and self.model and (lacking := self.feature.lacks(self.model)):
            return State.UNSUPPORTED, lacking
        if not self.hits:
            common = self.fallbacks.most_common(1)
            return State.NEVER_HIT, common[0][0] if common else "no call reached it"
        return State.ACTIVE, ""


@dataclass
class Plan:
    """The features of one process and the guard that watches over them.

    `on_event` is called when something happened that a reader should see at once (a first hit, a verdict, the end
    of a request), `on_progress` when counts moved (once a denoising step).
    """

    settings: Settings
    release: str
    records: dict[str, FeatureRecord]
    on_event: Callable[[], None] = lambda: None
    on_progress: Callable[[], None] = lambda: None
    _kept: dict[str, Any] = field(default_factory=dict)
    _served: str = ""

    def __post_init__(self) -> None:
        self.guard = Guard(
            GuardPolicy.parse(self.settings.guard),
            parity=self.settings.parity,
            max_ulp={id: record.feature.max_ulp for id, record in self.records.items()},
            agree=tensor_parallel_agreement(),
            on_event=lambda verdict, *_: (self.on_progress if verdict is Verdict.ADMITTED else self.on_event)(),
        )

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """What a patch module keeps for this plan, made at the first call: it outlives reverts."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept

    def active(self) -> list[FeatureRecord]:
        return [record for record in self.records.values() if record.state is State.ACTIVE]

    def serve(self, model: str) -> None:
        """Notes that a model of this family runs here: what is said of a feature is about that model."""
        if model != self._served:
            self._served = model
            for record in self.records.values():
                record.model = model

    def narrow(self, path: str) -> None:
        """Forgets the features of the other path, "llm" or "diffusion", once it is known what this process serves."""
        self.records = {id: record for id, record in self.records.items() if record.feature.serves(path)}

    def loaded(self, model: str) -> None:
        """Notes which model has been loaded here, unless one of its modules has said so: that may be of a family
        which serves models by other names, too."""
        if not self._served:
            self.serve(model)

    def failed_signatures(self, feature_id: str) -> list[str]:
        return [
            v["signature"]
            for v in self.guard.verdicts
            if v["feature"] == feature_id and v["verdict"] == State.PARITY_FAILED
        ]

    def observed(self, record: FeatureRecord) -> tuple[State, str]:
        """See `FeatureRecord.observed`."""
        return record.observed(self.failed_signatures(record.feature.id))

    def described(self, record: FeatureRecord) -> str:
        """The observed state with its reason in brackets, for tables and reports."""
        state, reason = self.observed(record)
        return f"{state} ({reason})" if reason else str(state)

    def summary(self, role: str) -> str:
        """The status line: `active 6/7 (diffusion worker 0); off: a; unsupported: b (no nvcc)`."""
        states = {record.feature.id: record.planned() for record in self.records.values()}
        active = sum(state is State.ACTIVE for state, _ in states.values())
        parts = [f"active {active}/{len(states)} ({role})"]
        for state in State:
            named = [f"{id} ({reason})" if reason else id for id, (s, reason) in states.items() if s is state]
            named += [
                f"{record.feature.id} in {port.name} ({why})"
                for record in self.active()
                for port, (out, why) in record.out.items()
                if out is state
            ]
            if named and state is not State.ACTIVE:
                parts.append(f"{state}: {', '.join(named)}")
        return "; ".join(parts)


def make_plan(
    settings: Settings,
    release: contracts.Release | None,
    environment: Environment | None = None,
    catalogue: Iterable[Feature] = CATALOGUE,
) -> Plan:
    """Decides about every feature; `environment` is this machine unless given.

    Reads SGLang's source files, imports nothing of it.
    """
    environment = replace(environment or detect(), emulated=settings.emulate)
    records = {}
    for feature in catalogue:
        record = records[feature.id] = FeatureRecord(feature, State.ACTIVE)
        if decided := _decide(feature, settings, release, environment):
            record.state, record.reason = decided
        elif release is not None:
            for port in feature.ports:
                if out := _out(port, release):
                    record.take_out(port, *out)
            if record.state is State.ACTIVE and feature.needs_a_gpu and not environment.gpu:
                record.state, record.reason = State.OFF, f"{EMULATE}=1 emulates arithmetic, not a GPU"
    return Plan(settings, release.version if release else "none", records)


def _decide(
    feature: Feature, settings: Settings, release: contracts.Release | None, environment: Environment
) -> tuple[State, str] | None:
    """Why the feature cannot run in any model, or None."""
    if off := settings.off_because(feature.id):
        return State.OFF, off
    if release is None:
        return State.UNSUPPORTED, "SGLang is not installed here"
    if all(_is_native(port, release) for port in feature.ports):
        return State.NATIVE, f"stock does it since {feature.ports[0].native_since}"
    unmet = [why for need in feature.needs if (why := REQUIREMENTS[need](environment))]
    return (State.UNSUPPORTED, "; ".join(unmet)) if unmet else None


def _out(port: Port, release: contracts.Release) -> tuple[State, str] | None:
    """Why the port is not to be applied, or None."""
    if _is_native(port, release):
        return State.NATIVE, f"stock does it since {port.native_since}"
    drift = contracts.check(port.contract, release)
    return (State.DRIFTED, str(drift)) if drift else None


def _is_native(port: Port, release: contracts.Release) -> bool:
    since = port.native_since
    return since is not None and contracts.is_recorded(release) and Version(release.version) >= Version(since)


_lock = threading.Lock()
_current: Plan | None = None


def current() -> Plan | None:
    """The plan of this process, or None while the plugin has not been asked for."""
    return _current


def install(plan: Plan | None) -> None:
    """Makes `plan` the plan of this process."""
    global _current
    with _lock:
        _current = plan
