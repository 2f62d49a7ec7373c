"""`rmsnorm_quant` and `silu_quant`: a module's output arrives at the next linear in block FP8 already quantized.

Each decoder layer, once built, tells which linear alone reads what its norms and its activation put out:

    input_layernorm          -> self_attn.qkv_proj    as a twin
    post_attention_layernorm -> mlp.gate_up_proj      as a twin
    mlp.act_fn               -> mlp.down_proj         as the operand itself

A norm still writes its bf16 rows, where stock has them; the tensor carries the operand as an attribute, its twin. The
linear that the twin names takes it, once, if the tensor is at the version and address that it had; everything else
on the way (all-reduce, gather, LoRA, hooks, another linear) sees the rows that it always saw, and what makes a new
tensor loses the twin. Writing the rows costs a fifth of the norm's bytes. The activation's rows are three times as
wide and never leave the MLP: `mlp.forward` hands what `act_fn` returns to `down_proj`, so that it is given the
operand as the tuple that SGLang's own linears take. It is looked at in every call that this is still so.

Under torch.compile, in inference tensors (which have no versions), with weights or activations in another dtype, and
wherever `can_use` refuses, the call is stock's. The guard compares rows, residual and operand with stock's kernels,
once for each width and form; a call that comes first while a CUDA graph is captured is stock's.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang_fastpath.kernels import rmsnorm_quant, silu_quant
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import GROUP, Quantized
from sglang_fastpath.patches.llm import block_fp8
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sglang_fastpath.features import LLAMA, QWEN2, QWEN3
from sglang_fastpath.guard import Verdict, is_capturing
from sglang_fastpath.plan import FeatureRecord, Plan

# The decoder layers, and the MLPs whose `forward` hands what `act_fn` returns to `down_proj` and nothing else.
_MODELS = {
    "sglang.srt.models.qwen3:Qwen3DecoderLayer.__init__": QWEN3,
    "sglang.srt.models.qwen2:Qwen2DecoderLayer.__init__": QWEN2,
    "sglang.srt.models.llama:LlamaDecoderLayer.__init__": LLAMA,
}
_MLPS = ("sglang.srt.models.qwen2:Qwen2MLP", "sglang.srt.models.llama:LlamaMLP")

TWIN = "_sglang_fastpath_twin"
NORM, ACTIVATION = "rmsnorm_quant", "silu_quant"

# Rows and residual sums, if the module puts them out, and what the next linear reads.
Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Twin:
    """What a tensor carries: its rows as the operand of one linear, and what says that they are still its rows."""

    operand: Quantized
    linear: nn.Module
    version: int
    address: int


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the features' sites, by target: `MultiPlatformOp.forward`, `Fp8LinearMethod.apply`
    and the decoder layers' `__init__`."""
    outputs = plan.kept(__name__, lambda: QuantizedOutputs(records, plan))
    by_name = {"forward": outputs.wrap_forward, "apply": outputs.wrap_apply}
    port = next(iter(records.values())).feature.port_of(__name__)
    assert port
    return {
        site: by_name.get(site.rpartition(".")[2]) or functools.partial(outputs.wrap_init, _MODELS[site])
        for site in port.sites
    }


class QuantizedOutputs:
    """Which module feeds which linear, and the wraps of both ends."""

    def __init__(self, records: Mapping[str, FeatureRecord], plan: Plan) -> None:
        self._records = records
        self._plan = plan
        # Producer -> the module that owns the linear, and the linear's name in it. Read anew in every call: LoRA puts
        # another module in the linear's place.
        self._readers: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )

    def wrap_init(self, model: str, init: Callable[..., None]) -> Callable[..., None]:
        """The `__init__` of a decoder layer of this family."""

        @functools.wraps(init)
        def initialize(layer: Any, *args: Any, **kwargs: Any) -> None:
            init(layer, *args, **kwargs)
            self._plan.serve(model)
            if NORM in self._records:
                self._readers[layer.input_layernorm] = weakref.ref(layer.self_attn), "qkv_proj"
                if hasattr(layer.mlp, "gate_up_proj"):
                    self._readers[layer.post_attention_layernorm] = weakref.ref(layer.mlp), "gate_up_proj"
            if ACTIVATION in self._records and _name(type(layer.mlp)) in _MLPS:
                self._readers[layer.mlp.act_fn] = weakref.ref(layer.mlp), "down_proj"

        return initialize

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`MultiPlatformOp.forward`, through which norms and activations dispatch."""

        @functools.wraps(forward)
        def op_forward(op: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or (reader := self._readers.get(op)) is None:
                return forward(op, *args, **kwargs)
            linear, stock = getattr(reader[0](), reader[1], None), functools.partial(forward, op)
            if reader[1] == "down_proj":
                return self._activation(stock, linear, *args, **kwargs)
            return self._norm(stock, op, linear, *args, **kwargs)

        return op_forward

    def wrap_apply(self, apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`Fp8LinearMethod.apply`: takes the twin of its input, if it is the linear that the twin is for."""

        @functools.wraps(apply)
        def method_apply(method: Any, layer: nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
            twin = None if torch.compiler.is_compiling() else getattr(x, TWIN, None)
            if twin is None:
                return apply(method, layer, x, bias)
            delattr(x, TWIN)
            if (
                twin.linear is not layer
                or twin.version != x._version
                or twin.address != x.data_ptr()
                or twin.operand.q.shape != x.shape
            ):
                self._records[NORM].fall_back("the normed rows were changed, or reached another linear")
                return apply(method, layer, x, bias)
            self._records[NORM].hit()
            return apply(method, layer, (twin.operand.q, twin.operand.scale), bias)

        return method_apply

    def _norm(
        self,
        stock: Callable[..., Any],
        norm: Any,
        linear: Any,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
    ) -> Any:
        weight = norm.weight.data
        signature = f"{x.shape[-1]} wide{', residual' if residual is not None else ''}"
        refused = (
            _norm_refusal(norm, x, residual, post_residual_addition)
            or rmsnorm_quant.can_use(x, weight, residual)
            or block_fp8.refusal(linear, x.shape[1])
            or self._not_now(NORM, signature)
        )
        if refused:
            self._records[NORM].fall_back(refused)
            return stock(x, residual, post_residual_addition)
        # Stock writes over x and the residual. So do we, unless stock may run as well, for comparison.
        ours, total = x, residual
        if not self._unwatched(NORM, signature):
            ours, total = x.clone(), None if residual is None else residual.clone()

        def fast() -> tuple[Outputs, Quantized]:
            out = ours if total is not None else torch.empty_like(ours)
            operand = rmsnorm_quant.rmsnorm_quant(ours, weight, norm.variance_epsilon, residual=total, out=out)
            return (out, total, operand.q, operand.scale), operand

        def both() -> Outputs:
            rows, sums = (stock(x), None) if residual is None else stock(x, residual)
            return rows, sums, *_stock_quantize(rows)

        (rows, sums, *_), operand = self._chosen(NORM, signature, fast, both)
        if operand is not None and rows is not None:
            setattr(rows, TWIN, Twin(operand, linear, rows._version, rows.data_ptr()))
        return rows if residual is None else (rows, sums)

    def _activation(self, stock: Callable[..., Any], linear: Any, x: Tensor) -> Any:
        signature = f"{x.shape[-1] // 2} wide"
        refused = (
            _activation_refusal(linear, x)
            or silu_quant.can_use(x)
            or block_fp8.refusal(linear, x.shape[1] // 2)
            or self._not_now(ACTIVATION, signature)
        )
        if refused:
            self._records[ACTIVATION].fall_back(refused)
            return stock(x)
        stocks: list[Tensor] = []

        def fast() -> tuple[Outputs, Quantized]:
            operand = silu_quant.silu_quant(x)
            return (None, None, operand.q, operand.scale), operand

        def both() -> Outputs:
            stocks.append(stock(x))
            return None, None, *_stock_quantize(stocks[0])

        _, operand = self._chosen(ACTIVATION, signature, fast, both)
        if operand is None:
            return stocks[0]
        self._records[ACTIVATION].hit()
        return operand.q, operand.scale

    def _not_now(self, feature: str, signature: str) -> str | None:
        """Why the guard would not let the fast path run, or None."""
        guard = self._plan.guard
        verdict = guard.verdict(feature, signature)
        if verdict is Verdict.FAILED:
            return "the guard sent it to stock"
        if verdict is None and guard.policy.mode != "off" and is_capturing():
            return "first met while a CUDA graph was captured"
        return None

    def _unwatched(self, feature: str, signature: str) -> bool:
        """Whether the guard will run the fast path alone."""
        mode = self._plan.guard.policy.mode
        return mode == "off" or (mode == "once" and self._plan.guard.verdict(feature, signature) is not None)

    def _chosen(
        self,
        feature: str,
        signature: str,
        fast: Callable[[], tuple[Outputs, Quantized]],
        stock: Callable[[], Outputs],
    ) -> tuple[Outputs, Quantized | None]:
        """What the guard answers with, and the operand if that is the fast path's."""
        made: list[tuple[Outputs, Quantized]] = []

        def run() -> Outputs:
            made.append(fast())
            return made[-1][0]

        outputs = self._plan.guard.run(feature, signature, fast=run, stock=stock)
        return outputs, next((operand for ours, operand in made if ours is outputs), None)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _norm_refusal(norm: Any, x: Tensor, residual: Tensor | None, addition: Tensor | None) -> str | None:
    if addition is not None:
        return "there is something to be added behind the residual"
    if norm.variance_size_override is not None or norm.cast_x_before_out_mul or norm.fp32_residual:
        return "the norm is of another kind"
    if x.is_cuda and _norm_in_cuda():
        return "FlashInfer's norm is its CUDA kernel here"
    if _batch_invariant():
        return "batch-invariant kernels are on"
    if torch.is_inference_mode_enabled() or x.is_inference() or (residual is not None and residual.is_inference()):
        return "inference tensors have no versions"
    if not x.numel():
        return "no tokens"
    return None


def _activation_refusal(linear: Any, x: Tensor) -> str | None:
    from sglang.srt.layers.linear import RowParallelLinear

    if type(linear) is not RowParallelLinear or not linear.input_is_parallel:
        return "the next linear is wrapped or of another kind"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "the next linear has hooks"
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "hooks on all modules"
    return None if len(x) else "no tokens"


@functools.cache
def _batch_invariant_probe() -> Callable[[], bool]:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    probe: Callable[[], bool] = is_batch_invariant_mode_enabled
    return probe


def _batch_invariant() -> bool:
    return _batch_invariant_probe()()


@functools.cache
def _norm_in_cuda() -> bool:
    """Whether FlashInfer, which SGLang has imported by now, runs another norm than the one that was read."""
    import flashinfer.norm

    return bool(flashinfer.norm._USE_CUDA_NORM)


def _stock_quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the linear makes of its input: by stock's kernel on a GPU, by its reference elsewhere."""
    quantized: tuple[Tensor, Tensor]
    if not rows.is_cuda:
        quantized = quantize_per_token_group(rows)
        return quantized
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    quantized = sglang_per_token_group_quant_fp8(
        rows, GROUP, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    return quantized
