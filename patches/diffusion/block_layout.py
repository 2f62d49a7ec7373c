"""How a denoiser's block is made: what the fused forward needs of it, and why it may not run it.

`BlockParts` declares it once for a class of blocks, `BlockLayout` is what was found in one block. Everything that can
change after loading is compared again at every call: modules replaced (LoRA), hooks, parameters replaced or moved
(reload, offload).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang_fastpath.loaders.merged_linears import MergedLinears, NotMergeable, merge_linears
from torch import Tensor, nn

_LINEAR_TYPES = ("ColumnParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear")
_BLOCK = [128, 128]

Place = tuple[str, str]
"""Where a module hangs: the path of its parent in the block, and its name there."""


class Refused(ValueError):
    """A fused step cannot run on these tensors; the message says why."""


@dataclass(frozen=True)
class BlockParts:
    """What a class of blocks consists of, by path.

    `linears`: by what they are for; `merged` names those that run as one GEMM. `bypassed`: other modules that the
    fused forward goes around; a hook on one of them would not run. `bypassed_if_there`: those that not every release
    has. `norms`: layer norms without weights. `qk_norms`: RMSNorms, in the order in which the fused forward takes
    their weights. `biased`: every linear has a bias, or none. `refuse`: why a block of the class is not for us all
    the same, or None.
    """

    linears: dict[str, tuple[Place, ...]]
    merged: tuple[str, ...]
    bypassed: tuple[str, ...]
    norms: tuple[str, ...]
    qk_norms: tuple[str, ...]
    biased: bool
    refuse: Callable[[Any], str | None]
    bypassed_if_there: tuple[str, ...] = ()


class Linear(NamedTuple):
    """A linear, where it hangs, and where its parameters lay when it was looked at."""

    children: dict[str, nn.Module | None]
    name: str
    module: Any
    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None
    addresses: tuple[int, int, int]


@dataclass
class BlockLayout:
    """What the fused forward needs of one block, looked up once; `unchanged` says whether it still holds."""

    parts: BlockParts
    linears: dict[str, tuple[Linear, ...]]
    bypassed: tuple[tuple[dict[str, Any], str, Any], ...]
    norm_eps: float
    qk_eps: float
    qk_norm: tuple[Tensor, ...]
    qk_norm_places: tuple[tuple[dict[str, Any], int], ...] = ()  # where each weight hangs, and where it lay
    merged: dict[str, MergedLinears] = field(default_factory=dict)
    not_merged: str = ""
    version: int = 1
    verified: set[tuple[frozenset[str], bool, bool]] = field(default_factory=set)

    @classmethod
    def of(cls, block: nn.Module, parts: BlockParts) -> "BlockLayout":
        """Raises Refused if the block is not made as the fused forward expects."""
        try:
            return cls._of(block, parts)
        except AttributeError as error:
            raise Refused(f"the block is made otherwise: {error}") from None

    @classmethod
    def _of(cls, block: nn.Module, parts: BlockParts) -> "BlockLayout":
        linears = _look_at_linears(block, parts)
        bypassed: list[tuple[dict[str, Any], str, Any]] = []
        there = [path for path in parts.bypassed_if_there if _has(block, path)]
        for path in (*parts.bypassed, *there, *parts.norms, *parts.qk_norms):
            parent, _, name = path.rpartition(".")
            children, module = block.get_submodule(parent)._modules, block.get_submodule(path)
            if not type(module).__module__.startswith(("sglang.", "torch.nn.")):
                raise Refused(f"{path} is a {type(module).__name__}")
            bypassed.append((children, name, module))
        if why := parts.refuse(block):
            raise Refused(why)
        norms: list[Any] = [block.get_submodule(name) for name in parts.norms]
        if any(weight is not None for norm in norms for weight in norm.parameters()):
            raise Refused("a layer norm has weights")
        qk: list[Any] = [block.get_submodule(name) for name in parts.qk_norms]
        if len({norm.eps for norm in norms}) != 1 or len({norm.variance_epsilon for norm in qk}) != 1:
            raise Refused("the norms' epsilons differ")
        weights = tuple(norm.weight for norm in qk)
        for weight in weights:
            if weight.dtype != torch.bfloat16:
                raise Refused(f"a QK norm has a {weight.dtype} weight")
            if not weight.is_contiguous() or weight.data_ptr() % 16:
                raise Refused("the weight of a QK norm is not 16-byte aligned")
        layout = cls(parts, linears, tuple(bypassed), norms[0].eps, qk[0].variance_epsilon, weights)
        layout.qk_norm_places = tuple((norm._parameters, norm.weight.data_ptr()) for norm in qk)
        if bypassed_otherwise := layout.bypassed_otherwise():
            raise Refused(bypassed_otherwise)
        return layout

    @property
    def name(self) -> str:
        """The block's name in its model, as its linears know it."""
        place, linear = next(
            (places[-1], linears[-1])
            for places, linears in zip(self.parts.linears.values(), self.linears.values(), strict=True)
        )
        return str(linear.module.prefix).removesuffix(".".join(part for part in place if part)).rstrip(".")

    def modules(self) -> list[nn.Module]:
        """Every module of the block that the fused forward goes around, in a fixed order."""
        linears = [linear.module for linears in self.linears.values() for linear in linears]
        return linears + [module for _, _, module in self.bypassed]

    def bypassed_otherwise(self) -> str | None:
        """Which bypassed module was replaced, has hooks or a forward of its own, or None."""
        for children, name, module in self.bypassed:
            if _is_altered(module) or children.get(name) is not module:
                return f"{type(module).__name__} {name} was replaced, has hooks or a forward of its own"
        return None

    def unchanged(self) -> bool:
        # Spelled out: this runs in every block of every pass, and the host is what an eager pass waits for.
        for linears in self.linears.values():
            for children, name, module, weight, scale, bias, (weight_at, scale_at, bias_at) in linears:
                parameters = module._parameters
                if (
                    _is_altered(module)
                    or children.get(name) is not module
                    or parameters["weight"] is not weight
                    or parameters["weight_scale_inv"] is not scale
                    or parameters["bias"] is not bias
                    or weight.data_ptr() != weight_at
                    or scale.data_ptr() != scale_at
                    or (bias is not None and bias.data_ptr() != bias_at)
                ):
                    return False
        for (owner, address), norm_weight in zip(self.qk_norm_places, self.qk_norm, strict=True):
            if owner["weight"] is not norm_weight or norm_weight.data_ptr() != address:
                return False
        return self.bypassed_otherwise() is None

    def merge(self, block: nn.Module) -> None:
        """Merges the linears that run as one GEMM, or notes why not. Addresses are taken anew."""
        try:
            if why := _offloaded(block):
                raise NotMergeable(why)
            for name in self.parts.merged:
                self.merged[name] = merge_linears([linear.module for linear in self.linears[name]])
        except (NotMergeable, torch.OutOfMemoryError) as error:
            self.merged.clear()
            self.not_merged = str(error)
        self.linears = _look_at_linears(block, self.parts)


def _has(block: nn.Module, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return name in block.get_submodule(parent)._modules


def _is_altered(module: Any) -> bool:
    """Whether calling the module does more, or something else, than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _look_at_linears(block: nn.Module, parts: BlockParts) -> dict[str, tuple[Linear, ...]]:
    return {
        name: tuple(_look_at_linear(block, *place, biased=parts.biased) for place in places)
        for name, places in parts.linears.items()
    }


def _look_at_linear(block: nn.Module, parent: str, name: str, *, biased: bool) -> Linear:
    """Raises Refused unless it is SGLang's own linear in block FP8, whole on this rank."""
    children = block.get_submodule(parent)._modules
    module: Any = children.get(name)
    where = f"{parent}.{name}"
    if module is None:
        raise Refused(f"{where} is not there: the projections are packed")
    if type(module).__name__ not in _LINEAR_TYPES or not type(module).__module__.startswith("sglang."):
        raise Refused(f"{where} is a {type(module).__name__}")
    method = module.quant_method
    if type(method).__name__ != "Fp8LinearMethod" or not getattr(method, "block_quant", False):
        raise Refused(f"{where} is not in block FP8 ({type(method).__name__})")
    if list(method.quant_config.weight_block_size) != _BLOCK or getattr(method, "use_marlin", False):
        raise Refused(f"{where} has weight blocks of {method.quant_config.weight_block_size}")
    backend = getattr(method.w8a8_block_fp8_linear, "__name__", "?")
    if backend not in ("deepgemm_w8a8_block_fp8_linear_with_fallback", "w8a8_block_fp8_linear"):
        raise Refused(f"{where} does not run on DeepGEMM ({backend})")
    if module.skip_bias_add or getattr(module, "gather_output", False) or _is_altered(module):
        raise Refused(f"{where} gathers its output, keeps its bias, has hooks or a forward of its own")
    if getattr(module, "tp_size", 1) != 1:
        raise Refused(f"tensor parallelism over {module.tp_size} ranks")
    weight, scale, bias = (module._parameters.get(key) for key in ("weight", "weight_scale_inv", "bias"))
    if weight is None or scale is None:
        raise Refused(f"{where} has no block scales")
    if (bias is None) == biased:
        raise Refused(f"{where} has {'no' if biased else 'a'} bias")
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise Refused(f"{where} is {weight.dtype} with {scale.dtype} scales")
    if bias is not None and bias.dtype != torch.bfloat16:
        raise Refused(f"{where} has a {bias.dtype} bias")
    if weight.shape[0] % 128 or weight.shape[1] % 128 or not weight.is_contiguous() or not scale.is_contiguous():
        raise Refused(f"{where} is {tuple(weight.shape)}, not whole blocks")
    addresses = weight.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr()
    if addresses[0] % 16 or addresses[2] % 16:
        raise Refused(f"{where} is not 16-byte aligned")
    return Linear(children, name, module, weight, scale, bias, addresses)


def _offloaded(block: nn.Module) -> str | None:
    """Why this block's weights do not stay where they are, or None."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    if block._forward_pre_hooks:
        return "the block has hooks (layerwise offload)"
    args = get_global_server_args()
    for flag in ("dit_cpu_offload", "dit_layerwise_offload", "use_fsdp_inference"):
        if getattr(args, flag, False):
            return f"--{flag.replace('_', '-')}"
    return None
