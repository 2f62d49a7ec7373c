"""A block-FP8 GEMM as the tuner sees it: what decides which backends can run it, and how long they take.

`Problem` is the key of a decision, `Backend` what competes for it (kernels/gemm_backends.py has those that exist).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
VECTOR_BYTES = 16  # the widest load; addresses are told apart up to it
SCALE_ROWS = 4  # rows of fp32 scales in 16 bytes, to which MN-major scales are padded

Operand: TypeAlias = "tuple[Tensor, Tensor]"
"""(values, scales): of the activation [M, K], one scale for 1x128, of the weight [N, K], one for 128x128."""


@dataclass(frozen=True)
class Problem:
    """[M, K] x [N, K] -> [M, N].

    `dtypes`: activation, its scales, weight, its scales. `granularity`: elements a scale of the activation covers,
    and one of the weight. `layout`: of the five tensors in the order of `dtypes`, then the output; "k" is K-major
    and dense, "mn" MN-major with rows padded to 16 bytes, anything else the strides themselves. `alignment`: bytes
    that all five addresses are a multiple of, at most 16. Each is part of the key: a backend that is right and fast
    for one layout of the scales may be wrong or slow for another.
    """

    m: int
    n: int
    k: int
    dtypes: tuple[str, ...] = ("float8_e4m3fn", "float32", "float8_e4m3fn", "float32")
    granularity: tuple[str, str] = (f"1x{BLOCK}", f"{BLOCK}x{BLOCK}")
    layout: tuple[str, ...] = ("k", "mn", "k", "k", "k")
    alignment: int = VECTOR_BYTES
    out: str = "bfloat16"

    @classmethod
    def of(cls, lhs: Operand, rhs: Operand, out: Tensor) -> Self:
        """The problem that these tensors pose."""
        (q, scale), (weight, weight_scale) = lhs, rhs
        (m, k), n = q.shape, weight.shape[0]
        tensors = (q, scale, weight, weight_scale)
        return cls(
            m=m,
            n=n,
            k=k,
            dtypes=tuple(_name(tensor) for tensor in tensors),
            granularity=(
                f"1x{_block(k, scale.shape[1])}",
                f"{_block(n, weight_scale.shape[0])}x{_block(k, weight_scale.shape[1])}",
            ),
            layout=tuple(_layout(tensor) for tensor in (*tensors, out)),
            alignment=_alignment((*tensors, out)),
            out=_name(out),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `key`. Raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            for name, value in fields.items():
                fields[name] = tuple(value) if isinstance(value, list) else value
            made = cls(**fields)
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{text[:80]!r} is no GEMM problem: {error}") from None
        if made.key != text or min(made.m, made.n, made.k) < 1:
            raise ValueError(f"{text[:80]!r} is no GEMM problem")
        return made

    @property
    def key(self) -> str:
        """All of it, as JSON in one order."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def is_block_fp8(self) -> bool:
        """Whether values and scales are those of block FP8 on Hopper: e4m3, float32, 1x128 and 128x128."""
        plain = Problem(self.m, self.n, self.k)
        return (self.dtypes, self.granularity, self.out) == (plain.dtypes, plain.granularity, plain.out)

    def __str__(self) -> str:
        plain = Problem(self.m, self.n, self.k)
        odd = [f"{name} {value}" for name, value in asdict(self).items() if value != getattr(plain, name)]
        return " ".join((f"{self.m}x{self.n}x{self.k}", *odd))


class Backend(Protocol):
    """One way to compute a block-FP8 GEMM. `distributions`: the installed packages that decide what it computes."""

    name: str
    distributions: tuple[str, ...]

    def can_use(self, problem: Problem, sm: int) -> str | None:
        """Why it cannot run this problem on this architecture, or None."""

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        """Fills `out`, on the current stream. It may raise: whoever calls it has another backend."""


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _block(extent: int, parts: int) -> int:
    """How many elements one of so many scales covers; 128 wherever that fits, for a part of a block counts as one."""
    fits = [size for size in (BLOCK, *(1 << bits for bits in range(20))) if -(-extent // size) == parts]
    return fits[0] if fits else -(-extent // parts)


def _layout(tensor: Tensor) -> str:
    rows, columns = tensor.shape
    strides = tensor.stride()
    if strides[1] == 1 and (strides[0] == columns or rows == 1):
        return "k"
    if strides == (1, -(-rows // SCALE_ROWS) * SCALE_ROWS):
        return "mn"
    return "x".join(map(str, strides))


def _alignment(tensors: Sequence[Tensor]) -> int:
    bits = VECTOR_BYTES
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits & -bits
