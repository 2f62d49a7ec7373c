"""The modulation of every block of a denoiser at fixed addresses: what one captured pass writes and others read.

`modulation_ahead`: the pass that fills the table computes it for the next `ROWS` timesteps of the request at once.
Each of a denoiser's modulation linears reads its weight, [6*dim, dim], for the sake of one row; a GEMM of eight rows
reads it once for all of them. So in Qwen-Image seven of eight steps do without the 13.6 GB that these weights are.

Why a wrong row cannot be read:

- The rows are stock's own: what the linears read at a timestep comes from stock's forward, left where its first block
  would begin. The guard compares every linear's eight rows with eight calls of one row before any is used.
- They belong to one request: to its schedule, the very tensor, to its condition and modes, and to the weights that
  `ModelState` looks at before each step; they are dropped after the schedule's last step, or when a step fails.
- A pass's timestep is compared with the one that was foreseen, on the device. Before the last step's result is handed
  out the host looks at the outcome: a request in which one differed fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang_fastpath.patches.diffusion.call_signature import Ineligible
from sglang_fastpath.patches.diffusion.qwen_image_modulation import Source
from torch import Tensor, nn

ROWS = 8
# Buffers begin where the allocator's own blocks may: kernels that load vectors expect it of a tensor.
_ALIGNMENT = 256


@dataclass(eq=False)
class Step:
    """One denoising step: its place in the schedule, `timesteps` [steps], a tensor on the denoiser's device."""

    timesteps: Tensor
    index: int

    @property
    def is_last(self) -> bool:
        return self.index == len(self.timesteps) - 1


@dataclass
class LinearMode:
    """What the modulation linears do while a pass runs: `observe` shapes, `write` to a table or `read` from it.

    `outputs` is what they returned, with the rows of later timesteps where there are `later` inputs of theirs;
    `inputs` what they were given.
    """

    kind: str
    table: "ModulationTable"
    later: Sequence[Tensor] = ()
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    _batch: Tensor | None = None

    def run(self, forward: Callable[..., Any], linear: nn.Module, x: Tensor) -> Any:
        """A modulation linear's call: stock's pair of output and bias."""
        if self.kind == "read":
            return self.table.buffers[linear], None
        self.inputs.append(x)
        output, bias = forward(linear, self._with_later(x) if self.later else x)
        noted = output.unflatten(0, (ROWS, len(x))) if self.later else output
        if bias is None:
            self.outputs[linear] = noted
        return (noted[0] if self.later else output), bias

    def _with_later(self, x: Tensor) -> Tensor:
        """[ROWS * batch, dim], put together once a pass: all linears are given the same tensor."""
        if self._batch is None:
            self._batch = torch.cat([x, *self.later])
        if x is not self.inputs[0]:
            raise RuntimeError("modulation_ahead: a modulation linear was given another input than the first one was")
        return self._batch

    def one_input(self) -> Tensor | None:
        """What all the table's linears were given, if it was one tensor."""
        one = len({id(x) for x in self.inputs}) == 1 and len(self.outputs) == len(self.table.linears)
        return self.inputs[0] if one else None


class ModulationTable:
    """`buffers` is made when an eager pass has shown the outputs' shapes; `source` says what they hold now."""

    def __init__(self, linears: dict[nn.Module, str]) -> None:
        self.linears = linears
        self.buffers: dict[nn.Module, Tensor] = {}
        self.source: Source | None = None
        self.ahead: Ahead | None = None
        self.seen_input: tuple[Tensor, Tensor] | None = None
        """The timestep of an eager pass, and what all linears were given in it."""
        self._observed: dict[nn.Module, Tensor] = {}
        self._memory: Tensor | None = None  # uint8: all buffers, one behind the other

    def observe(self, mode: LinearMode, timestep: Tensor) -> None:
        """Takes note of an eager pass."""
        self._observed = mode.outputs
        given = mode.one_input()
        self.seen_input = None if given is None else (timestep.clone(), given)

    def make_buffers(self) -> bool:
        """True once there is a buffer for every linear."""
        if not self.buffers and len(self._observed) == len(self.linears):
            outputs = list(self._observed.values())
            with torch.inference_mode(False):
                self._memory = torch.empty(_size_of(outputs), dtype=torch.uint8, device=outputs[0].device)
                self.buffers = dict(zip(self._observed, _views(self._memory, outputs), strict=True))
        self._observed = {}
        return bool(self.buffers)

    def store(self, outputs: Mapping[nn.Module, Tensor]) -> None:
        """Copies what a writing pass computed, on the device; [ROWS, ...] each if there is a look ahead."""
        if self.ahead is None:
            torch._foreach_copy_([self.buffers[linear] for linear in outputs], list(outputs.values()))
        else:
            torch._foreach_copy_([self.ahead.rows[linear] for linear in outputs], list(outputs.values()))
            self._copy_row(self.ahead, 0)

    def new_ahead(self, step: Step, timestep: Tensor) -> "Ahead":
        """Room for `ROWS` timesteps, which are written down: this pass's, [batch], and the schedule's next ones.

        Raises:
            Ineligible: if the schedule does not tell what the timesteps of later passes will be.
        """
        assert self._memory is not None, "buffers come first"
        scheduled = step.timesteps
        if not isinstance(scheduled, Tensor):
            raise Ineligible(f"the schedule is a {type(scheduled).__name__}")
        if timestep.ndim != 1 or scheduled.ndim != 1:
            raise Ineligible(
                f"timesteps of shape {tuple(timestep.shape)} from a schedule of {tuple(scheduled.shape)}"
            )
        if (timestep.dtype, timestep.device) != (scheduled.dtype, scheduled.device):
            raise Ineligible(f"a timestep in {timestep.dtype} from a schedule in {scheduled.dtype}")
        ahead = Ahead(self._memory, self.buffers, timestep)
        ahead.foresee(step, timestep)
        return ahead

    def check_input(self, modulation_input: Callable[[Tensor], Tensor]) -> None:
        """Whether the linears are given what a pass that is left at its first block is about to give.

        Raises:
            Ineligible: if not, or not all of them the same.
        """
        if self.seen_input is None:
            raise Ineligible("the modulation linears are given different inputs")
        timestep, given = self.seen_input
        if not torch.equal(modulation_input(timestep), given):
            raise Ineligible("the modulation linears are not given what the first block is")

    def take_foreseen(self, step: Step, timestep: Tensor, given: Source) -> bool:
        """Puts this step's modulation into the buffers, if it has been computed ahead; `given` as at that time."""
        row = self.ahead.row_of(step, given) if self.ahead else None
        if self.ahead is None or row is None:
            return False
        self.ahead.compare(row, timestep)
        self._copy_row(self.ahead, row)
        return True

    def _copy_row(self, ahead: "Ahead", row: int) -> None:
        assert self._memory is not None
        self._memory.copy_(ahead.memory[row])


class Ahead:
    """The modulation of `ROWS` timesteps of one request.

    `memory`: uint8 [ROWS, bytes of one timestep's modulation]; `rows`: in it, by linear, [ROWS, *its output's shape].
    `foreseen`: [ROWS, batch], the timesteps, the first being the one of the pass that computes them.
    """

    def __init__(self, memory: Tensor, buffers: Mapping[nn.Module, Tensor], timestep: Tensor) -> None:
        with torch.inference_mode(False):
            self.memory = memory.new_empty((ROWS, *memory.shape))
            self.foreseen = torch.zeros((ROWS, *timestep.shape), dtype=timestep.dtype, device=timestep.device)
            self._unexpected = torch.zeros((), dtype=torch.bool, device=timestep.device)
        self.rows = dict(zip(buffers, _views(self.memory, list(buffers.values())), strict=True))
        self._given: Source | None = None
        self._first = 0
        self._compared = False

    def foresee(self, step: Step, timestep: Tensor) -> None:
        """Writes down the timesteps to compute: this pass's, then the schedule's next ones, as far as it goes."""
        self._first = step.index
        self.foreseen[0].copy_(timestep)
        later = step.timesteps[step.index + 1 : step.index + ROWS]
        if len(later):
            self.foreseen[1 : 1 + len(later)].copy_(later[:, None].expand(-1, len(timestep)))

    def computed(self, given: Source | None) -> None:
        """The rows hold what `foresee` has written down, computed from `given`."""
        self._given = given

    def row_of(self, step: Step, given: Source) -> int | None:
        """Where this step's modulation is, or None if it is not there."""
        row = step.index - self._first
        return row if 0 < row < ROWS and given.matches(self._given) else None

    def compare(self, row: int, timestep: Tensor) -> None:
        """Notes on the device whether a pass has the timestep that was foreseen."""
        unexpected = (timestep != self.foreseen[row]).any()
        if self._compared:
            self._unexpected.logical_or_(unexpected)
        else:
            self._unexpected.copy_(unexpected)
        self._compared = True

    def forget(self) -> None:
        """The rows are nobody's now."""
        self._given = None

    def end_request(self, *, failed: bool) -> None:
        """Waits for the device, if anything was compared; unless the request has failed by itself.

        Raises:
            RuntimeError: if a pass of the request had another timestep than its row was computed for.
        """
        self.forget()
        compared, self._compared = self._compared, False
        if compared and not failed and self._unexpected.item():
            raise RuntimeError(
                "modulation_ahead: a denoising step did not get the timestep that the request's schedule names for "
                "it, so this result would not be stock's. Set SGLANG_FASTPATH_MODULATION_AHEAD=0."
            )


class _Reached(BaseException):
    """A pass has come to its first block; not an `Exception`, which somebody on the way might handle."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def modulation_input(denoiser: Any, forward: Callable[[Any], Any], arguments: Mapping[str, Any], t: Tensor) -> Tensor:
    """What the modulation linears are given at a timestep `t` [batch]: silu(temb), [batch, dim].

    `forward(arguments)` is the denoiser's pass; it is left where the first block would begin.

    Raises:
        Ineligible: if the blocks are given no such tensor, or the two streams are given different ones.
    """
    first = denoiser.transformer_blocks[0]

    def reached(*_: Any, **given: Any) -> None:
        raise _Reached(given)

    first.forward = reached
    try:
        forward({**arguments, "timestep": t})
    except _Reached as end:
        given: Any = end.arguments
    else:
        raise Ineligible("the pass does not call its first block")
    finally:
        del first.forward
    image, text = given.get("temb_img_silu"), given.get("temb_txt_silu")
    if isinstance(image, Tensor) and image is text:
        return image
    raise Ineligible("image and text are not modulated by one tensor")


def rows_at_once(linears: Mapping[nn.Module, str], inputs: list[Tensor]) -> list[Tensor]:
    """Each linear's output for all inputs, [len(inputs) * batch, 6*dim], by one call."""
    batch = torch.cat(inputs)
    return [linear(batch)[0] for linear in linears]


def rows_one_by_one(linears: Mapping[nn.Module, str], inputs: list[Tensor]) -> list[Tensor]:
    """The same by a call for each input, as stock does it."""
    return [torch.cat([linear(x)[0] for x in inputs]) for linear in linears]


def _places(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Where each tensor's bytes begin and end, one behind the other."""
    places, start = [], 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        places.append((start, end))
        start = _aligned(end)
    return places


def _size_of(tensors: list[Tensor]) -> int:
    return _aligned(_places(tensors)[-1][1])


def _aligned(address: int) -> int:
    return -(-address // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors of these shapes and dtypes in uint8 `memory` [..., bytes], contiguous from the second dimension on."""
    return [
        memory[..., start:end].view(tensor.dtype).view(*memory.shape[:-1], *tensor.shape)
        for tensor, (start, end) in zip(like, _places(like), strict=True)
    ]
