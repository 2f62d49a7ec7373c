"""A class of denoiser blocks, each run by one fused forward in which features choose their steps.

A block's forward is replaced as a whole, because what is worth fusing crosses the borders of SGLang's modules (a
norm's output is only ever read by the next linear's quantizer). Inside, every step has a stock form and a fused one,
and each feature chooses its own steps, so that any subset runs. What those steps are is a model's own: see
qwen_image_block.py and flux2_blocks.py. What keeps them right is here:

- `BlockLayout.of` looks at every module that the fused forward goes around. LoRA wrappers, hooks, other
  quantizations, tensor or sequence parallelism, biases or norms of another kind: the block is stock's, with the
  reason counted. It is checked again at every call, by identity and address.
- The parity guard compares the block's outputs with stock's own forward, so there is no copy of stock's steps to go
  stale: for each kind of call every feature alone, then all that passed together; and each block once, whatever the
  call, and again when its weights have been merged anew or one of its modules has been replaced.
- The next block's norm is computed ahead only after that block has been seen to take this block's outputs, and is
  used only if it is given those very tensors again. A ControlNet residual makes new ones: nothing is computed ahead.
"""

import functools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from sglang_fastpath.kernels.fused_kernels import Quantized, QuantizedPair
from sglang_fastpath.patches.diffusion.block_layout import BlockLayout, BlockParts, Refused
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sglang_fastpath.guard import Verdict
from sglang_fastpath.plan import FeatureRecord, Plan

logger = logging.getLogger("sglang_fastpath")

_MISSES_ALLOWED = 2


class Ahead(NamedTuple):
    """The next block's first norm, computed at the end of the block before (`by`)."""

    by: nn.Module
    block: nn.Module
    inputs: tuple[Tensor, ...]  # as the next block will see them: streams first, then what its modulation comes from
    modulation: Any  # what the next block's forward needs of it; its own business
    operands: QuantizedPair | tuple[Quantized, ...]
    eps: float  # of the norm


class Call(Protocol):
    """One call of a block; a model's own call is a NamedTuple with these and more."""

    @property
    def block(self) -> Any: ...
    @property
    def layout(self) -> BlockLayout: ...
    @property
    def ahead(self) -> Ahead | None:
        """What the block before computed of this call, if it is of use."""

    @property
    def following(self) -> Any:
        """The block whose norm is to be computed ahead, or None."""

    @property
    def following_layout(self) -> BlockLayout | None: ...
    @property
    def streams(self) -> tuple[Tensor, ...]:
        """The residual streams that come in; as many go out, in the same order."""

    def kind(self) -> tuple[Any, ...]:
        """What tells calls apart that may need other verdicts: shapes, strides, alignment, flags."""

    def __str__(self) -> str:
        """The kind in words, for the guard's signatures."""

    def _replace(self, **fields: Any) -> Self: ...


class Forward(Protocol):
    """One pass through one block with a given set of features."""

    ahead: Ahead | None

    def run(self) -> tuple[Tensor, ...]:
        """The streams that go out; `ahead` is set if the next block's norm was computed."""


class FusedBlocks(ABC):
    """Wraps the forward of a class of blocks; one for all features that share it."""

    model: ClassVar[str]
    parts: ClassVar[BlockParts]
    ahead_by: ClassVar[str]
    """The feature that computes the next block's norm."""

    def __init__(self, records: Mapping[str, FeatureRecord], plan: Plan) -> None:
        self._records = records
        self._plan = plan
        self._layouts: weakref.WeakKeyDictionary[nn.Module, BlockLayout] = weakref.WeakKeyDictionary()
        # Kind of call -> the features that may run it together, the guard's signature, and why others may not.
        self._decided: dict[tuple[Any, ...], tuple[frozenset[str], str, dict[str, str]]] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._versions: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[Any]]] = weakref.WeakKeyDictionary()
        self._last: tuple[Any, ...] | None = None  # weak: the last block and its outputs
        self._following: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._misses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._ahead: Ahead | None = None

    @abstractmethod
    def call(self, block: Any, kwargs: dict[str, Any]) -> Call:
        """What the block was asked to do, with nothing ahead or following. Raises Refused."""

    @abstractmethod
    def forward(self, call: Any, features: frozenset[str], *, checking: bool = False) -> Forward:
        """Raises Refused, or `run` does, if `checking` and one of the features cannot run this call."""

    @abstractmethod
    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        """`Ahead.inputs` of this call."""

    def stock_outputs(self, result: Any) -> tuple[Tensor, ...]:
        """The streams in what stock's forward returned."""
        outputs: tuple[Tensor, ...] = result
        return outputs

    def result(self, outputs: tuple[Tensor, ...]) -> Any:
        """What the block returns, from the streams."""
        return outputs

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward: fused for whatever the guard has admitted, else `forward`."""

        @functools.wraps(forward)
        def block_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(block, *args, **kwargs)
            self._plan.serve(self.model)
            ahead, self._ahead = self._ahead, None
            try:
                call = self._with_neighbours(self._call(block, args, kwargs), ahead)
            except Refused as refusal:
                self._count(self._records, str(refusal))
                if ahead and block in self._layouts:  # else it is known as none to compute ahead for
                    self._miss(ahead.by, "was left to stock")
                return forward(block, *args, **kwargs)
            outputs = self._run(call, lambda: self.stock_outputs(forward(block, **kwargs)))
            self._last = weakref.ref(block), *map(weakref.ref, outputs)
            if self._ahead and not _all_same(self._ahead.inputs[: len(outputs)], outputs):
                self._ahead = None  # the guard answered with stock's outputs
            return self.result(outputs)

        return block_forward

    def _count(self, ids: Any, reason: str) -> None:
        for id in ids:
            self._records[id].fall_back(reason)

    def _call(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if args or torch.is_grad_enabled():
            raise Refused("gradients are enabled" if torch.is_grad_enabled() else "arguments are passed by position")
        if _in_breakable_graph():
            raise Refused("inside SGLang's breakable CUDA graph")
        if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
            raise Refused("hooks on all modules (torch.nn.modules.module.register_module_forward_hook)")
        call = self.call(block, kwargs)
        for stream in call.streams:
            if stream.dtype != torch.bfloat16 or torch.is_autocast_enabled(stream.device.type):
                raise Refused(f"activations are {stream.dtype}, or autocast is on")
            if not stream.is_contiguous():
                raise Refused("a stream is not contiguous")
        return call

    def _with_neighbours(self, call: Call, ahead: Ahead | None) -> Call:
        self._learn(call)
        used = ahead if ahead and ahead.block is call.block and _all_same(ahead.inputs, self.inputs(call)) else None
        if ahead and not used:
            self._miss(ahead.by, "was given other tensors")
        if used and used.eps != call.layout.norm_eps:
            used = None  # the norm was replaced after the block before had looked at it
        if (
            used
            and isinstance(used.operands, QuantizedPair)
            and used.operands.joint is not None
            and not call.layout.merged
        ):
            used = None  # laid out for a grouped GEMM, but the linears are not merged any more
        following, following_layout = None, None
        if self.ahead_by in self._records and self.may_go_ahead(call):
            following, following_layout = self._next(call.block)
        return call._replace(ahead=used, following=following, following_layout=following_layout)

    def may_go_ahead(self, call: Any) -> bool:
        """Whether the next block's norm can be known from this call."""
        return True

    def layout(self, block: nn.Module) -> BlockLayout:
        """The block's layout as it is now. Raises Refused."""
        layout = self._layouts.get(block)
        if layout is None or not layout.unchanged():
            self._layouts.pop(block, None)
            layout = BlockLayout.of(block, self.parts)
            if "scale_prepack" in self._records:
                layout.merge(block)
            layout.version = self._version(block, layout)
            self._layouts[block] = layout
        return layout

    def _version(self, block: nn.Module, layout: BlockLayout) -> int:
        """Counts what makes another block of it, of which earlier verdicts say nothing: merging, other modules."""
        version, known = self._versions.get(block, (0, []))
        modules = layout.modules()
        if layout.merged or [reference() for reference in known] != modules:
            version += 1
        self._versions[block] = version, [weakref.ref(module) for module in modules]
        return version

    def _learn(self, call: Call) -> None:
        """Notes that the block was given the last block's outputs."""
        if self._last is None:
            return
        last, *outputs = (reference() for reference in self._last)
        self._last = None
        if last is not None and last is not call.block and _all_same(tuple(outputs), call.streams):
            self._following[last] = weakref.ref(call.block)

    def _miss(self, by: nn.Module, why: str) -> None:
        """What `by` computed ahead was for other tensors than came next, or for another block, or for stock."""
        self._following.pop(by, None)
        self._misses[by] = self._misses.get(by, 0) + 1
        self._count((self.ahead_by,), f"the next block {why}: its norm was computed in vain")

    def _next(self, block: nn.Module) -> tuple[Any, BlockLayout | None]:
        reference = self._following.get(block)
        following: Any = reference() if reference else None
        if following is None or self._misses.get(block, 0) >= _MISSES_ALLOWED:
            return None, None
        if block._forward_hooks or following._forward_pre_hooks:
            return None, None
        layout = self._layouts.get(following)
        return (following, layout) if layout else (None, None)

    def _run(self, call: Call, stock: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        steps = call.ahead is not None, call.following is not None
        kind = (*call.kind(), bool(call.layout.merged), *steps)
        decided = self._decided.get(kind)
        if decided is None:
            stock = functools.cache(stock)  # several features are compared with one and the same output
            decided = self._decided[kind] = self._decide(call, stock)
        features, signature, refused = decided
        for id, reason in refused.items():
            self._records[id].fall_back(reason)
        if not features:
            return stock()
        feature, form = min(features), (features, *steps)
        if form not in call.layout.verified:
            block_signature = f"{self.model} {self._name(call)}: {_describe(*form)}"
            if self._plan.guard.verdict(feature, block_signature) is Verdict.ADMITTED:
                call.layout.verified.add(form)
            else:
                signature = block_signature
        ran = False

        def fast() -> tuple[Tensor, ...]:
            nonlocal ran
            ran = True
            forward = self.forward(call, features)
            outputs = forward.run()
            self._ahead = forward.ahead
            for id in features:
                self._records[id].hit()
            return outputs

        outputs: tuple[Tensor, ...] = self._plan.guard.run(feature, signature, fast=fast, stock=stock)
        if not ran:
            self._count(features, f"left to stock by the guard, see {feature}")
        return outputs

    def _name(self, call: Call) -> str:
        """The block's name for the guard: unlike any other block's, and new with every version of it."""
        name = self._names.get(call.block)
        if name is None:
            own = call.layout.name
            others = sum(other == own or other.startswith(f"{own} of model ") for other in self._names.values())
            name = self._names[call.block] = own + (f" of model {others + 1}" if others else "")
        return name + (f" (version {call.layout.version})" if call.layout.version > 1 else "")

    def _decide(
        self, call: Call, stock: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[frozenset[str], str, dict[str, str]]:
        """Which features can run this kind of call: each is tried alone before they run together."""
        guard, what = self._plan.guard, f"{self.model}, {call}"
        alone = call._replace(ahead=None, following=None, following_layout=None)
        admitted, refused = [], {}
        for id in self._records:
            signature = f"alone, {what}"
            if guard.verdict(id, signature) is Verdict.FAILED:
                continue

            def attempt(id: str = id) -> tuple[Tensor, ...]:
                return self.forward(alone, frozenset((id,)), checking=True).run()

            try:
                attempt()
            except Refused as refusal:
                refused[id] = str(refusal)
                continue
            except Exception:  # the guard meets it again, and keeps it on record
                logger.debug("%s %s", id, signature, exc_info=True)
            if guard.policy.mode != "off" and guard.verdict(id, signature) is None:
                guard.run(id, signature, fast=attempt, stock=stock)
            if guard.verdict(id, signature) is not Verdict.FAILED:
                admitted.append(id)
        together = _describe(frozenset(admitted), call.ahead is not None, call.following is not None)
        return frozenset(admitted), f"{together}, {what}", refused


def _describe(features: frozenset[str], before: bool, after: bool) -> str:
    parts = ["+".join(sorted(features))]
    parts += ["norm by the block before"] if before else []
    parts += ["norm for the block after"] if after else []
    return ", ".join(parts)


def _all_same(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(tensors, others, strict=True))


@functools.cache
def _breakable_graph_probe() -> Callable[[], bool]:
    try:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
    except ImportError:  # before 0.5.16
        return lambda: False
    probe: Callable[[], bool] = is_in_breakable_cuda_graph
    return probe


def _in_breakable_graph() -> bool:
    return _breakable_graph_probe()()
