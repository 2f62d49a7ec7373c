"""Qwen-Image's transformer block on block FP8, from fused kernels: one forward for five features.

`QwenImageTransformerBlock.forward` is replaced as a whole, because what is worth fusing crosses the borders of
SGLang's modules (a norm's output is only ever read by the next linear's quantizer). Inside, every step has a stock
form and a fused one, and each feature chooses its own steps, so that any subset runs:

    step                                   fused by        stock
    norm1 + modulate + quantize            norm_quant      block.img_norm1 / txt_norm1, then the linears' quantizer
    QKV GEMMs                              scale_prepack   six linears; merged into two GEMMs, or one grouped
    bias, QK norm, RoPE, joint buffers     qkv_epilogue    bias adds, apply_qk_norm_with_optional_rope, cat
    split + quantize attention output      act_quant       narrow, then the linears' quantizer
    gate + residual + norm2 + quantize     norm_quant      block.img_norm2 / txt_norm2
    up GEMMs                               scale_prepack   two linears; one grouped GEMM
    GELU + quantize                        act_quant       F.gelu, then the linears' quantizer
    gate + residual (+ next block's norm1) norm_quant, or bias_fold alone; stock: block.fuse_mul_add
    bias of any linear                     bias_fold, where the kernel that reads the GEMM's output is fused

What keeps it right:

- `BlockLayout.of` looks at every module that the fused forward goes around. LoRA wrappers, hooks, other
  quantizations, tensor or sequence parallelism, biases or norms of another kind: the block is stock's, with the
  reason counted. It is checked again at every call, by identity and address.
- The parity guard compares the block's two outputs with stock's own forward, so there is no copy of stock's steps to
  go stale: for each kind of call every feature alone, then all that passed together; and each block once, whatever
  the call, and again when its weights have been merged anew.
- The next block's norm is computed ahead only after that block has been seen to take this block's outputs, and is
  used only if it is given those very tensors again. A ControlNet residual makes new ones: nothing is computed ahead.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang_fastpath.patches.diffusion.qwen_image_forward import Ahead, Call, FusedForward, Outputs
from sglang_fastpath.patches.diffusion.qwen_image_layout import BlockLayout, Refused
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sglang_fastpath.guard import Verdict
from sglang_fastpath.plan import FeatureRecord, Plan

logger = logging.getLogger("sglang_fastpath")

_MISSES_ALLOWED = 2


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the features' sites, by target."""
    (site,) = next(iter(records.values())).feature.sites
    blocks = plan.kept(__name__, lambda: FusedBlocks(records, plan))
    return {site: blocks.wrap_forward}


class FusedBlocks:
    """Wraps the block's forward; one for all features that share it."""

    def __init__(self, records: Mapping[str, FeatureRecord], plan: Plan) -> None:
        self._records = records
        self._plan = plan
        self._layouts: weakref.WeakKeyDictionary[nn.Module, BlockLayout] = weakref.WeakKeyDictionary()
        # Kind of call -> the features that may run it together, the guard's signature, and why others may not.
        self._decided: dict[tuple[Any, ...], tuple[frozenset[str], str, dict[str, str]]] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._last: tuple[Any, Any, Any] | None = None  # weak: the last block and its outputs
        self._following: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._misses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._ahead: Ahead | None = None

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward: fused for whatever the guard has admitted, else `forward`."""

        @functools.wraps(forward)
        def block_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(block, *args, **kwargs)
            ahead, self._ahead = self._ahead, None
            try:
                call = self._call(block, ahead, args, kwargs)
            except Refused as refusal:
                self._count(self._records, str(refusal))
                return forward(block, *args, **kwargs)
            result = self._run(call, lambda: forward(block, **kwargs))
            if isinstance(result, tuple) and len(result) == 2:
                self._last = weakref.ref(block), weakref.ref(result[0]), weakref.ref(result[1])
                if self._ahead and (self._ahead.inputs[0] is not result[0] or self._ahead.inputs[1] is not result[1]):
                    self._ahead = None  # the guard answered with stock's outputs
            return result

        return block_forward

    def _count(self, ids: Any, reason: str) -> None:
        for id in ids:
            self._records[id].fall_back(reason)

    def _call(self, block: Any, ahead: Ahead | None, args: Any, kwargs: dict[str, Any]) -> Call:
        if args or torch.is_grad_enabled():
            raise Refused("gradients are enabled" if torch.is_grad_enabled() else "arguments are passed by position")
        text, image = kwargs["encoder_hidden_states"], kwargs["hidden_states"]
        temb = kwargs["temb_txt_silu"], kwargs["temb_img_silu"]
        if (
            image.dtype != torch.bfloat16
            or text.dtype != torch.bfloat16
            or torch.is_autocast_enabled(image.device.type)
        ):
            raise Refused(f"activations are {image.dtype} and {text.dtype}, or autocast is on")
        if not image.is_contiguous() or not text.is_contiguous():
            raise Refused("a stream is not contiguous")
        rotary = kwargs.get("image_rotary_emb")
        if rotary is None or not isinstance(rotary[0], Tensor) or rotary[0].dim() != 2:
            raise Refused("there are no rotary tables")
        attention = kwargs.get("joint_attention_kwargs") or {}
        mask = attention.get("attn_mask")
        if attention.get("sp_text_sharded") or attention.get("attention_mask") is not None:
            raise Refused("the sequence is sharded, or the mask has another name")
        if mask is None and kwargs.get("encoder_hidden_states_mask") is not None:
            raise Refused("the text has a mask of its own")
        if _in_breakable_graph():
            raise Refused("inside SGLang's breakable CUDA graph")
        if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
            raise Refused("hooks on all modules (torch.nn.modules.module.register_module_forward_hook)")
        layout = self._layout(block)
        self._learn(block, text, image)
        used = ahead if ahead and ahead.block is block and _all_same(ahead.inputs, (text, image, *temb)) else None
        if ahead and not used:
            self._miss(ahead.by)
        if used and used.operands.joint is not None and not layout.merged:
            used = None  # laid out for a grouped GEMM, but the linears are not merged any more
        following, following_layout = None, None
        if kwargs.get("modulate_index") is None and "norm_quant" in self._records:
            following, following_layout = self._next(block)
        return Call(
            block,
            layout,
            text,
            image,
            temb,
            (rotary[1], rotary[0]),
            attention,
            kwargs.get("modulate_index"),
            kwargs.get("modulation_cache_key"),
            used,
            following,
            following_layout,
        )

    def _layout(self, block: nn.Module) -> BlockLayout:
        layout = known = self._layouts.get(block)
        if layout is None or not layout.unchanged():
            self._layouts.pop(block, None)
            layout = BlockLayout.of(block)
            layout.merges = known.merges if known else 0
            if "scale_prepack" in self._records:
                layout.merge(block)
            self._layouts[block] = layout
        return layout

    def _learn(self, block: nn.Module, text: Tensor, image: Tensor) -> None:
        """Notes that `block` was given the last block's outputs."""
        if self._last is None:
            return
        last, last_text, last_image = (reference() for reference in self._last)
        self._last = None
        if last is not None and last is not block and last_text is text and last_image is image:
            self._following[last] = weakref.ref(block)

    def _miss(self, by: nn.Module) -> None:
        """What `by` computed ahead was for other tensors than came next, or for another block."""
        self._following.pop(by, None)
        self._misses[by] = self._misses.get(by, 0) + 1
        self._count(("norm_quant",), "the next block was given other tensors: its norm was computed in vain")

    def _next(self, block: nn.Module) -> tuple[Any, BlockLayout | None]:
        reference = self._following.get(block)
        following: Any = reference() if reference else None
        if following is None or self._misses.get(block, 0) >= _MISSES_ALLOWED:
            return None, None
        if block._forward_hooks or following._forward_pre_hooks:
            return None, None
        layout = self._layouts.get(following)
        return (following, layout) if layout else (None, None)

    def _run(self, call: Call, stock: Callable[[], Outputs]) -> Outputs:
        steps = call.ahead is not None, call.following is not None
        kind = (
            call.text.shape,
            call.image.shape,
            call.text.data_ptr() % 16,
            call.image.data_ptr() % 16,
            *((table.shape, table.stride(), table.dtype, table.data_ptr() % 16) for table in call.rotary),
            call.attention.get("attn_mask") is not None,
            call.modulate_index is not None,
            bool(call.layout.merged),
            call.image.device,
            *steps,
        )
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
            block_signature = f"{self._name(call)}: {_describe(*form)}"
            if self._plan.guard.verdict(feature, block_signature) is Verdict.ADMITTED:
                call.layout.verified.add(form)
            else:
                signature = block_signature
        ran = False

        def fast() -> Outputs:
            nonlocal ran
            ran = True
            forward = FusedForward(call, features)
            outputs = forward.run()
            self._ahead = forward.ahead
            for id in features:
                self._records[id].hit()
            return outputs

        outputs: Outputs = self._plan.guard.run(feature, signature, fast=fast, stock=stock)
        if not ran:
            self._count(features, f"left to stock by the guard, see {feature}")
        return outputs

    def _name(self, call: Call) -> str:
        """The block's name for the guard: unlike any other block's, and new when its weights were merged anew."""
        name = self._names.get(call.block)
        if name is None:
            others = sum(other.prefix == call.block.prefix for other in self._names)
            name = self._names[call.block] = call.block.prefix + (f" of model {others + 1}" if others else "")
        return name + (f" (merged {call.layout.merges} times)" if call.layout.merges > 1 else "")

    def _decide(self, call: Call, stock: Callable[[], Outputs]) -> tuple[frozenset[str], str, dict[str, str]]:
        """Which features can run this kind of call: each is tried alone before they run together."""
        guard = self._plan.guard
        batch, text_tokens, width = call.text.shape
        what = f"{batch} x ({text_tokens} text + {call.image.shape[1]} image) tokens of {width}"
        what += ", a mask" if call.attention.get("attn_mask") is not None else ""
        what += ", modulate_index" if call.modulate_index is not None else ""
        alone = call._replace(ahead=None, following=None)
        admitted, refused = [], {}
        for id in self._records:
            signature = f"alone, {what}"
            if guard.verdict(id, signature) is Verdict.FAILED:
                continue
            try:
                forward = FusedForward(alone, frozenset((id,)), checking=True)
                forward.run()
            except Refused as refusal:
                refused[id] = str(refusal)
                continue
            except Exception:  # the guard meets it again, and keeps it on record
                logger.debug("%s %s", id, signature, exc_info=True)
            if guard.policy.mode != "off" and guard.verdict(id, signature) is None:
                guard.run(id, signature, fast=forward.run, stock=stock)
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
