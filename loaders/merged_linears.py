"""Several block-FP8 linears as one: weights, scales and biases concatenated, the parameters turned into views.

Q, K and V of both streams (or the two up projections) then run as one GEMM, and an update in place of any single
parameter (LoRA merge, weight reload) is an update of the merged tensor. Nothing is requantized: with [128, 128]
blocks and output widths that are multiples of 128, concatenation keeps every shard's own scales.

Merging holds one part twice at a time: each original is freed as soon as its parameter points into the merged tensor.
Layers are merged one by one, so the peak stays below stock's plus one layer's merged tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCK = 128
PARAMETERS = ("weight", "weight_scale_inv", "bias")


class NotMergeable(ValueError):
    """These linears cannot be merged; the message says why."""


@dataclass(frozen=True)
class MergedLinears:
    """`parts` in the order of their rows.

    weight: [sum N, K] float8_e4m3fn. scale: [sum N / 128, K / 128] float32, row-major, as DeepGEMM takes it on SM90.
    bias: [sum N], or None if the parts have none.
    """

    parts: tuple[nn.Module, ...]
    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def merge_linears(linears: Sequence[nn.Module]) -> MergedLinears:
    """Merges the linears' parameters in place; afterwards each is a row slice of the merged tensor.

    Every linear has `weight` [N, K] float8_e4m3fn, `weight_scale_inv` [N/128, K/128] float32 and `bias` [N] or None.

    Raises NotMergeable, before anything is changed, if they differ in K, dtype or device, or if N is not a
    multiple of 128 (a block of scales would straddle two parts), or if the scales are packed (UE8M0).
    """
    _check(linears)
    merged: dict[str, Tensor | None] = {}
    # Outside inference mode: a parameter that is an inference tensor could not be updated in place later.
    with torch.inference_mode(False), torch.no_grad():
        for name in PARAMETERS:
            parameters = [linear._parameters[name] for linear in linears]
            merged[name] = None if parameters[0] is None else _merge([p for p in parameters if p is not None])
    weight, scale = merged["weight"], merged["weight_scale_inv"]
    assert weight is not None and scale is not None
    return MergedLinears(tuple(linears), weight, scale, merged["bias"])


def _check(linears: Sequence[nn.Module]) -> None:
    first = linears[0]
    for linear in linears:
        for name in PARAMETERS:
            ours, theirs = first._parameters.get(name), linear._parameters.get(name)
            if ours is None or theirs is None:
                if ours is not theirs or name != "bias":
                    raise NotMergeable(f"one of {len(linears)} linears has no {name}")
                continue
            if ours.dtype != theirs.dtype or ours.device != theirs.device or ours.shape[1:] != theirs.shape[1:]:
                raise NotMergeable(
                    f"{name} {tuple(theirs.shape)} {theirs.dtype} on {theirs.device} beside "
                    f"{tuple(ours.shape)} {ours.dtype} on {ours.device}"
                )
        weight, scale = linear._parameters["weight"], linear._parameters["weight_scale_inv"]
        assert weight is not None and scale is not None
        if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
            raise NotMergeable(f"weights are {weight.dtype} with {scale.dtype} scales")
        rows, k = weight.shape
        if rows % BLOCK or k % BLOCK or scale.shape != (rows // BLOCK, k // BLOCK):
            raise NotMergeable(f"a weight of {tuple(weight.shape)} with scales of {tuple(scale.shape)}")


def _merge(parameters: list[nn.Parameter]) -> Tensor:
    first = parameters[0]
    rows = sum(parameter.shape[0] for parameter in parameters)
    if _are_adjacent(parameters):
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())
    merged = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        view = merged[start : start + parameter.shape[0]]
        view.copy_(parameter.data)
        parameter.data = view
        start += parameter.shape[0]
    return merged


def _are_adjacent(parameters: list[nn.Parameter]) -> bool:
    """Whether they are merged already: slices of one storage, one behind the other."""
    first = parameters[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.data_ptr() != address:
            return False
        if not parameter.is_contiguous():
            return False
        address += parameter.numel() * parameter.element_size()
    return True
