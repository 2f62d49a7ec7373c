"""The parity guard: no fast path serves a call until it has given stock's bytes for that kind of call.

`Guard.run` gets both paths as callables. On the first call with a new signature it runs both, compares the
outputs as bytes (`compare`) and keeps the verdict for that feature and signature. `GuardPolicy` says how
often it checks again, `tensor_parallel_agreement` makes the ranks of one model replica decide together.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, dtype

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bits of the largest magnitude that is not a NaN; what lies above is one. A dtype that is missing here has
# no distance in ulp (integers, bool, unsigned or NaN-as-minus-zero float formats).
_LARGEST_NUMBER = {
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}
_INT64_MIN = -(2**63)
_ULP_CHUNK = 1 << 22  # elements widened to int64 at a time, so that a mismatch cannot exhaust the memory


class Verdict(StrEnum):
    ADMITTED = "admitted"
    FAILED = "parity-failed"


class Outcome(IntEnum):
    """What one rank found in one check; the ranks' common outcome is the smallest."""

    FAILED = 0
    NO_VERDICT = 1
    MATCH = 2


# (subject, number of the check on this subject, own outcome) -> the ranks' common outcome. It may wait for
# the other ranks, but not if the own outcome is FAILED: that settles the common one.
Agreement = Callable[[str, int, Outcome], Outcome]


@dataclass(frozen=True)
class Difference:
    """How one output of the fast path differs from stock's."""

    output: int
    """Which output, counted through nested tuples from 0."""
    count: int
    total: int
    first_index: tuple[int, ...]
    """Index of the first differing element in row-major order; () for a 0-d tensor or if `note` says why."""
    max_ulp: int | None
    """Largest distance in units in the last place; None where that means nothing (integers, a NaN)."""
    note: str = ""

    def __str__(self) -> str:
        if self.count == 0:
            return f"output {self.output}: {self.note}"
        ulp = "" if self.max_ulp is None else f", at most {self.max_ulp} ulp apart"
        note = f", {self.note}" if self.note else ""
        where = f"first at index {self.first_index}"
        return f"output {self.output}: {self.count} of {self.total} elements differ, {where}{ulp}{note}"


def compare(fast: object, stock: object) -> Difference | None:
    """The worst difference between two outputs, compared as bytes; None if there is none.

    Takes tensors, None, and tuples or lists of them, nested at will. Types, lengths, devices, dtypes and
    shapes must be equal, strides need not. A NaN equals a NaN of the same bits only, and -0 differs from +0.
    Of several differing outputs, the worst is the first without a distance in ulp, else the one with the
    largest. Equal outputs cost one pass over the memory and one synchronization in all.

    Raises TypeError for a leaf that is neither a tensor nor None.
    """
    import torch

    differences: list[Difference] = []
    flags: list[Tensor] = []
    flagged: list[tuple[int, Tensor, Tensor]] = []
    with torch.no_grad():
        for output, (ours, theirs) in enumerate(_leaves(fast, stock)):
            if note := _mismatch(ours, theirs):
                differences.append(Difference(output, 0, 0, (), None, note))
            elif isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and ours.numel():
                flags.append((_bits(ours) != _bits(theirs)).any())
                flagged.append((output, ours, theirs))
            elif ours is not None and not isinstance(ours, torch.Tensor):
                raise TypeError(f"output {output} is a {type(ours).__name__}: only tensors and None can be compared")
        if flags:
            differs = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
            differences += [_measure(*pair) for pair, differ in zip(flagged, differs, strict=True) if differ]
    return min(differences, key=lambda d: (d.max_ulp is not None, -(d.max_ulp or 0), d.output), default=None)


def _leaves(fast: object, stock: object) -> Iterator[tuple[object, object]]:
    if (
        isinstance(fast, (tuple, list))
        and isinstance(stock, (tuple, list))
        and type(fast) is type(stock)
        and len(fast) == len(stock)
    ):
        for ours, theirs in zip(fast, stock, strict=True):
            yield from _leaves(ours, theirs)
    else:
        yield fast, stock


def _mismatch(fast: object, stock: object) -> str:
    """Why two leaves cannot even be compared bit by bit, or ''."""
    import torch

    if isinstance(fast, torch.Tensor) and isinstance(stock, torch.Tensor):
        for what in ("device", "dtype", "shape"):
            ours, theirs = getattr(fast, what), getattr(stock, what)
            if ours != theirs:
                if what == "shape":
                    ours, theirs = tuple(ours), tuple(theirs)
                return f"{what} {ours} against {theirs}".replace("torch.", "")
        return ""
    if type(fast) is type(stock) and not isinstance(fast, (tuple, list)):
        return ""
    return f"{_kind(fast)} against {_kind(stock)}"


def _kind(value: object) -> str:
    if value is None:
        return "None"
    length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{length}"


def _real(tensor: Tensor) -> Tensor:
    """The tensor itself; a complex one as pairs of reals along a new last dimension."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bit patterns as signed integers of the same width (not a copy)."""
    import torch

    tensor = _real(tensor)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.element_size()])


def _measure(output: int, fast: Tensor, stock: Tensor) -> Difference:
    """The details of a difference that is known to be there."""
    import torch

    ours, theirs = _bits(fast), _bits(stock)
    differs = ours != theirs
    max_ulp, nans = _max_ulp(ours[differs], theirs[differs], _real(stock).dtype)
    if fast.is_complex():
        differs = differs.any(-1)
    position = int(differs.flatten().to(torch.uint8).argmax())
    index: list[int] = []
    for size in reversed(stock.shape):
        position, remainder = divmod(position, size)
        index.insert(0, remainder)
    note = f"a NaN on either side in {nans} of them" if nans else ""
    return Difference(output, int(differs.sum()), stock.numel(), tuple(index), max_ulp, note)


def _max_ulp(fast: Tensor, stock: Tensor, float_type: dtype) -> tuple[int | None, int]:
    """Largest distance in ulp between two vectors of bit patterns, and how many pairs hold a NaN.

    A sign-magnitude pattern v maps to v if it is not negative, else to min - v (min: the integer type's
    least value): monotone in the float's value, neighbours 1 apart, both zeros 0.
    """
    import torch

    largest = _LARGEST_NUMBER.get(str(float_type).removeprefix("torch."))
    if largest is None:
        return None, 0
    least = torch.iinfo(fast.dtype).min
    nans, max_ulp = 0, 0
    for start in range(0, fast.numel(), _ULP_CHUNK):
        ours, theirs = (
            torch.where(bits < 0, least - bits, bits)
            for bits in (vector[start : start + _ULP_CHUNK].long() for vector in (fast, stock))
        )
        nans += int(((ours.abs() > largest) | (theirs.abs() > largest)).sum())
        # For 64 bits the distance needs all of an unsigned int64: wrap around, and order by the flipped sign.
        distance = torch.maximum(ours, theirs) - torch.minimum(ours, theirs)
        max_ulp = max(max_ulp, int((distance ^ _INT64_MIN).max()) - _INT64_MIN)
    return (None if nans else max_ulp), nans


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import torch

    # Without a driver, asking about capture raises.
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class GuardPolicy:
    """When a call is checked: `once` per signature, also one admitted call in `every` (`sample`), `always`,
    or never (`off`: the fast path runs unchecked, whatever it gives or raises)."""

    mode: Literal["once", "sample", "always", "off"] = "once"
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `once`, `sample:N`, `always` or `off`; ValueError for anything else."""
        plain = {"once": cls("once"), "always": cls("always"), "off": cls("off")}
        if text in plain:
            return plain[text]
        mode, _, every = text.partition(":")
        if mode == "sample" and every.isascii() and every.isdigit() and int(every):
            return cls("sample", int(every))
        raise ValueError(f"guard policy {text!r}: choose once, sample:N (N a whole number from 1), always or off")


@dataclass
class _Signature:
    verdict: Verdict | None = None
    checks: int = 0
    admitted_calls: int = 0
    difference: Difference | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Finding:
    outcome: Outcome
    difference: Difference | None = None
    reason: str = ""


class Guard:
    """Chooses between a fast path and stock, call by call; one for all features of a process.

    A signature is whatever decides which code runs: layer kind, shapes, dtypes, strides, alignment, flags.
    It must be the same on every rank (sizes after sharding; no rank, device index or address), and its
    `repr` must name it.

    parity: `bitwise` admits equal bytes only. `ulp` lets a feature named in `max_ulp` (feature id -> bound)
    differ by at most its bound; the others must still match in bytes.
    agree: see `Agreement`; None for a process that decides alone.
    on_event: called after a verdict falls, with it, the feature and the signature. A verdict may fall on an
    admitted signature (a recheck, an exception): whoever captured its fast path in a graph must let go of it.
    """

    def __init__(
        self,
        policy: GuardPolicy,
        *,
        parity: Literal["bitwise", "ulp"] = "bitwise",
        max_ulp: Mapping[str, int] | None = None,
        agree: Agreement | None = None,
        on_event: Callable[[Verdict, str, Hashable], None] | None = None,
    ) -> None:
        import torch

        self.policy = policy
        self._bounds = dict(max_ulp or {}) if parity == "ulp" else {}
        self._agree = agree
        self._on_event = on_event
        self._recheck_every = policy.every if policy.mode in ("sample", "always") else 0
        self._lock = threading.Lock()
        self._signatures: dict[tuple[str, Hashable], _Signature] = {}
        self._admitted: dict[tuple[str, Hashable], None] = {}
        self._banned: dict[tuple[str, Hashable], None] = {}
        # What `run` may hand to the fast path without looking further: nothing if calls are to be rechecked.
        self._trusted = {} if self._recheck_every else self._admitted
        self._unchecked: Counter[str] = Counter()
        self.checks = 0
        """How often both paths ran. A call that left it alone ran what it will run the next time."""

        # While Dynamo traces, a plain `+= 1` would become part of the graph, and a guard on the old value
        # would recompile it on every call. A function marked constant really runs, once per trace.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_compiling() -> None:
            self._count_unchecked("compiling")

        self._count_compiling = count_compiling

    def run(self, feature: str, signature: Hashable, *, fast: Callable[[], T], stock: Callable[[], T]) -> T:
        """The result of `fast` if its signature is admitted, of `stock` otherwise and on every check.

        A check runs `stock` first, then `fast`, on the current stream. Both must therefore leave alone what
        the other one reads: for a kernel that writes in place, the callables clone. A `fast` that raises
        must leave its inputs intact too, because `stock` answers the call in its place, and the signature
        is banned. Running out of memory in `fast` or in the comparison is no verdict, merely stock's turn.
        What `stock` raises is the caller's; KeyboardInterrupt and SystemExit are everybody's.

        No check happens while a CUDA graph is being captured or torch.compile traces: unless the signature
        is admitted already, `stock` runs. A compiled graph is specialized to the signature's values.
        """
        key = (feature, signature)
        if key in self._trusted:
            try:
                return fast()
            except Exception as error:
                self._admitted_raised(key, error)
            return stock()
        if key in self._banned:
            return stock()
        if self.policy.mode == "off":
            return fast()
        return self._run_watched(key, fast, stock)

    @property
    def failures(self) -> int:
        """How many signatures were sent to stock for good: whoever captured a fast path in a graph watches it."""
        return len(self._banned)

    def verdict(self, feature: str, signature: Hashable) -> Verdict | None:
        """What is known of one signature; None before its first check, or if no check gave a verdict."""
        known = self._signatures.get((feature, signature))
        return known.verdict if known else None

    def withdraw(self, feature: str, signature: Hashable) -> None:
        """Takes back an admission, so that the next call is checked: the fast path is another one now."""
        key = (feature, signature)
        with self._lock:
            if key not in self._banned:
                self._signatures.pop(key, None)
                self._admitted.pop(key, None)

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """One JSON-ready entry per signature with a verdict: feature, signature, verdict, checks, difference
        (the fields of `Difference`, or None), reason (why it failed if no difference says it, or '')."""
        with self._lock:
            return [
                {
                    "feature": feature,
                    "signature": str(signature),
                    "verdict": str(known.verdict),
                    "checks": known.checks,
                    "difference": known.difference and asdict(known.difference),
                    "reason": known.reason,
                }
                for (feature, signature), known in self._signatures.items()
                if known.verdict
            ]

    @property
    def counters(self) -> dict[str, Any]:
        """`checks` (calls that ran both paths), `admitted` and `failed` (signatures), and `unchecked`: how
        often a due check gave no verdict, by reason (`capturing`, `compiling`: once per trace,
        `out of memory`, `no verdict on another rank`)."""
        with self._lock:
            verdicts = Counter(known.verdict for known in self._signatures.values())
            return {
                "checks": sum(known.checks for known in self._signatures.values()),
                "admitted": verdicts[Verdict.ADMITTED],
                "failed": verdicts[Verdict.FAILED],
                "unchecked": dict(self._unchecked),
            }

    def _run_watched(self, key: tuple[str, Hashable], fast: Callable[[], T], stock: Callable[[], T]) -> T:
        import torch

        if torch.compiler.is_compiling():
            if key in self._admitted:
                return fast()
            self._count_compiling()
            return stock()

        capturing = is_capturing()
        with self._lock:
            known = self._signatures.setdefault(key, _Signature())
            due = known.verdict is None
            if known.verdict is Verdict.ADMITTED:
                known.admitted_calls += 1
                due = self._recheck_every > 0 and known.admitted_calls % self._recheck_every == 0
            if due and not capturing:
                known.checks += 1
                self.checks += 1
            number = known.checks
            admitted = known.verdict is Verdict.ADMITTED
        if due and not capturing:
            return self._check(key, number, fast, stock)
        if due:
            self._count_unchecked("capturing")
        if admitted:
            try:
                return fast()
            except Exception as error:
                self._admitted_raised(key, error)
        return stock()

    def _check(self, key: tuple[str, Hashable], number: int, fast: Callable[[], T], stock: Callable[[], T]) -> T:
        try:
            expected = stock()
        except Exception:
            self._settle(key, self._common(key, number, _Finding(Outcome.NO_VERDICT)))
            raise
        self._settle(key, self._common(key, number, self._examine(key[0], fast, expected)))
        return expected

    def _examine(self, feature: str, fast: Callable[[], object], expected: object) -> _Finding:
        try:
            actual = fast()
            _refuse_shared_memory(actual, expected)
            difference = compare(actual, expected)
        except Exception as error:
            if _is_out_of_memory(error):
                return _Finding(Outcome.NO_VERDICT, reason="out of memory")
            return _Finding(Outcome.FAILED, reason=_describe(error))
        bound = self._bounds.get(feature)
        if difference is None or (
            bound is not None and difference.max_ulp is not None and difference.max_ulp <= bound
        ):
            return _Finding(Outcome.MATCH, difference)
        return _Finding(Outcome.FAILED, difference)

    def _common(self, key: tuple[str, Hashable], number: int, own: _Finding) -> _Finding:
        """This rank's finding, turned into what all ranks agree on. Each check ends in exactly one
        agreement, whatever happened in it, so no rank waits for one that will not come."""
        if self._agree is None:
            return own
        try:
            outcome = self._agree(_subject(key), number, own.outcome)
        except Exception as error:
            return own if own.outcome is Outcome.FAILED else _Finding(Outcome.FAILED, reason=_describe(error))
        if outcome is own.outcome:
            return own
        if outcome is Outcome.FAILED:
            return _Finding(outcome, own.difference, "another rank's fast path failed the check")
        return _Finding(outcome, reason="no verdict on another rank")

    def _settle(self, key: tuple[str, Hashable], finding: _Finding) -> None:
        if finding.outcome is Outcome.NO_VERDICT:
            if finding.reason:
                self._count_unchecked(finding.reason)
            return
        verdict = Verdict.ADMITTED if finding.outcome is Outcome.MATCH else Verdict.FAILED
        with self._lock:
            known = self._signatures[key]
            if known.verdict is Verdict.FAILED:
                return  # another thread's check of the same signature failed: that stands
            news = known.verdict is not verdict
            known.verdict, known.difference, known.reason = verdict, finding.difference, finding.reason
            if verdict is Verdict.ADMITTED:
                self._admitted[key] = None
            else:
                self._admitted.pop(key, None)
                self._banned[key] = None
        if news:
            self._announce(key, verdict, finding)

    def _announce(self, key: tuple[str, Hashable], verdict: Verdict, finding: _Finding) -> None:
        feature, signature = key
        if verdict is Verdict.FAILED:
            why = "; ".join(str(part) for part in (finding.reason, finding.difference) if part)
            logger.warning(
                "%s: parity failed for signature %s, which runs stock from now on: %s", feature, signature, why
            )
        if self._on_event:
            try:
                self._on_event(verdict, feature, signature)
            except Exception:
                logger.exception("%s: the observer of the guard's verdicts failed", feature)

    def _admitted_raised(self, key: tuple[str, Hashable], error: Exception) -> None:
        if _is_out_of_memory(error):
            self._count_unchecked("out of memory")
            return
        finding = _Finding(Outcome.FAILED, reason=_describe(error))
        if self._recheck_every:  # the other ranks still count on this one for the next check: answer it now
            self._common(key, self._signatures[key].checks + 1, finding)
        self._settle(key, finding)

    def _count_unchecked(self, reason: str) -> None:
        with self._lock:
            self._unchecked[reason] += 1


def _subject(key: tuple[str, Hashable]) -> str:
    feature, signature = key
    return f"{feature}/{hashlib.sha256(repr(signature).encode()).hexdigest()[:32]}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_out_of_memory(error: Exception) -> bool:
    """True for the allocators' own exceptions and for CUDA's, which launchers raise as a RuntimeError."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def _refuse_shared_memory(fast: object, stock: object) -> None:
    """An in-place kernel on an input that was not cloned gives both results in one tensor: always equal.

    A parameter may come back from both: linears return their bias so, and no forward pass writes to it.
    """
    import torch

    for output, (ours, theirs) in enumerate(_leaves(fast, stock)):
        if (
            isinstance(ours, torch.Tensor)
            and isinstance(theirs, torch.Tensor)
            and ours.numel()
            and ours.data_ptr() == theirs.data_ptr()
            and not isinstance(theirs, torch.nn.Parameter)
        ):
            raise ValueError(
                f"both paths returned the same memory as output {output}, which proves nothing: "
                "give paths that write in place cloned inputs, and leave out outputs that neither computes"
            )


def tensor_parallel_agreement(timeout: float = 120.0) -> Agreement:
    """The agreement among the ranks that run one denoiser together: SGLang diffusion's TP x SP ranks.

    They run the same layers on the same sizes in the same order (SGLang pads sequence shards to equal
    length), so they reach the same checks. CFG-parallel ranks do not take part: each runs another guidance
    branch, with another prompt length, and may skip steps; nor do data- and pipeline-parallel ranks.
    The groups are looked up at each check, because SGLang swaps them in some stages (0.5.23 folds the CFG
    ranks into SP). Without such groups, or with one rank in each, the own outcome stands.

    Each rank publishes its outcome in torch.distributed's store and reads the others', within the TP group,
    then within the SP group; the smallest counts. No collective runs, so nothing can be mismatched with
    SGLang's own, and a rank that never arrives (its signature differs, against the rules) costs the others
    `timeout` seconds and a TimeoutError, which bans the signature, rather than a hang. A late rank then
    reads FAILED.
    """

    def agree(subject: str, number: int, outcome: Outcome) -> Outcome:
        late: TimeoutError | None = None
        for ranks in _replica_groups():
            try:
                outcome = _agree_among(ranks, subject, number, outcome, timeout)
            except TimeoutError as error:
                late, outcome = error, Outcome.FAILED  # the next group must still hear of it
        if late:
            raise late
        return outcome

    return agree


def _replica_groups() -> list[tuple[int, ...]]:
    """Global ranks of this process's TP group and SP group, those of one rank left out."""
    # Not imported: where SGLang diffusion is not loaded, it has no groups.
    state = sys.modules.get("sglang.multimodal_gen.runtime.distributed.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return []
    groups = [tuple(group.ranks) for group in (state.get_tp_group(), state.get_sp_group())]
    return [ranks for ranks in dict.fromkeys(groups) if len(ranks) > 1]


def _agree_among(ranks: Sequence[int], subject: str, number: int, outcome: Outcome, timeout: float) -> Outcome:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store, own_rank = _get_default_store(), dist.get_rank()
    group = f"sglang-fastpath/{'-'.join(map(str, ranks))}/{subject}"
    own = f"{group}/{number}/{own_rank}"
    store.set(own, str(int(outcome)))
    if outcome is Outcome.FAILED:
        return outcome
    keys = [f"{group}/{number}/{rank}" for rank in ranks]
    deadline = time.monotonic() + timeout
    # Polling, since a blocking wait would hold the store's lock against NCCL's watchdog, and Ctrl-C.
    while not store.check(keys):
        if time.monotonic() > deadline:
            store.set(own, str(int(Outcome.FAILED)))
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            raise TimeoutError(
                f"ranks {missing} did not reach this check within {timeout:g} s; "
                "a signature must be the same on every rank"
            )
        time.sleep(0.001)
    common = min(Outcome(int(store.get(key))) for key in keys)
    if number > 1:  # whoever published this check has read the previous one
        store.delete_key(f"{group}/{number - 1}/{own_rank}")
    return common
