"""`step_graph`: a denoiser's whole pass as one CUDA graph, captured while serving and replayed from then on.

The first call of a signature runs eagerly. If nothing had to be checked in it (no other feature's guard is still at
work), the second one captures the pass, attention included, and the guard compares the graph's first replay with the
eager pass. From the third call on, the pass is one launch.

What keeps it right:

- Every tensor argument is copied into a buffer of the graph's own, every plain value is part of the signature, and
  an argument that is neither sends the call to eager. So do a text mask, whose lengths stock reads on the host,
  attention metadata, and attention backends that look at more than shapes.
- Results are copied out of the graph's memory, because the two guidance passes of a step share it.
- `ModelState` looks at weights, modules and LoRA once a step, hooks at every pass; a change drops the graphs.
- A signature that the guard sends to stock, in any feature, drops all graphs: one may have captured its fast path.
- More than one rank, offload, torch.compile, stock's breakable graphs and TeaCache are left to stock.

The second guidance pass of a step must not compute the modulation again. Under `cfg_mod_cache` (or where stock does
the same by itself) a pass is captured in two forms: one computes every block's modulation and leaves it in a table,
one reads it there. A table belongs to the step and the timestep tensor that it was filled for.
"""

import functools
import hashlib
import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang_fastpath.patches.diffusion.call_signature import FlatCall, Ineligible, flatten
from sglang_fastpath.patches.diffusion.graph_recorder import CudaGraphRecorder, Recorder
from sglang_fastpath.patches.diffusion.graph_store import CapturedPass, GraphStore, TooLarge
from sglang_fastpath.patches.diffusion.model_state import ModelState
from sglang_fastpath.patches.diffusion.qwen_image_modulation import Source, modulation_linears
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sglang_fastpath.guard import Verdict, is_capturing
from sglang_fastpath.plan import FeatureRecord, Plan, State

logger = logging.getLogger("sglang_fastpath")

_REUSE = "cfg_mod_cache"
# Signatures remembered of one denoiser; each is a few hundred bytes.
_MOST_SEEN = 4096
# Global arguments under which something else moves the weights, splits the pass or compiles it.
_SERVER_ARGS = {
    "dit_layerwise_offload": "layerwise offload",
    "dit_cpu_offload": "CPU offload of the denoiser",
    "use_fsdp_inference": "FSDP",
    "enable_torch_compile": "torch.compile",
    "enable_breakable_cuda_graph": "SGLang's own breakable CUDA graphs",
    "enable_cfg_parallel": "CFG parallelism",
}
_SKIP_SOFTMAX = "sglang.multimodal_gen.runtime.layers.attention.backends.skip_softmax"


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the feature's sites, by target."""
    (record,) = records.values()
    graphs = plan.kept(__name__, lambda: StepGraphs(record, plan, CudaGraphRecorder()))
    run_denoising_step, linear_forward, *denoiser_forwards = record.feature.sites
    return {
        run_denoising_step: graphs.wrap_step,
        linear_forward: graphs.wrap_linear,
        **dict.fromkeys(denoiser_forwards, graphs.wrap_pass),
    }


@dataclass(eq=False)
class _Signature:
    """What is known of one kind of call of one denoiser; it is also the key of its graph.

    A kind: the arguments' signature, the modes, and whether the modulation is read from the table. `name` is how the
    guard knows it.
    """

    model: int
    name: str
    steady: bool = False  # its last eager pass checked nothing
    starved: bool = False  # memory ran out in its capture before
    given_up: str = ""  # why it cannot be captured


@dataclass
class _Table:
    """The modulation of every block at fixed addresses: what one graph writes and another reads.

    `buffers` is made when an eager pass has shown the outputs' shapes. `source` says what they hold now.
    """

    linears: dict[nn.Module, str]
    observed: dict[nn.Module, Tensor] = field(default_factory=dict)
    buffers: dict[nn.Module, Tensor] = field(default_factory=dict)
    source: Source | None = None

    def make_buffers(self) -> bool:
        """True once there is a buffer for every linear."""
        if not self.buffers and len(self.observed) == len(self.linears):
            with torch.inference_mode(False):
                self.buffers = {
                    linear: torch.empty(output.shape, dtype=output.dtype, device=output.device)
                    for linear, output in self.observed.items()
                }
        self.observed.clear()
        return bool(self.buffers)


@dataclass
class _LinearMode:
    """What the modulation linears do while a pass runs: `observe` shapes, `write` to a table or `read` from it."""

    kind: str
    table: _Table
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)


@dataclass
class _Model:
    """What is known of one denoiser, as long as it stays as `state` has seen it."""

    number: int
    state: ModelState
    anew: str = ""  # why the graphs from before were dropped, until a call has counted it
    looked_at_in: object = None  # the step in which the state was last compared
    tables: dict[Hashable, _Table] = field(default_factory=dict)
    signatures: dict[Hashable, _Signature] = field(default_factory=dict)


@dataclass(frozen=True)
class _Captured:
    """What a graph does beside computing: what the features count in it, and whether it fills the table."""

    counts: "_Counts"
    fills: bool


@dataclass(frozen=True)
class _Pass:
    """One call that may be captured. `reads`: from the table, which holds this step's modulation."""

    model: _Model
    signature: _Signature
    call: FlatCall
    table: _Table | None
    source: Source | None
    reads: bool
    keep: tuple[Any, ...]


class StepGraphs:
    """Wraps the denoisers' forward, the step (whose passes share a modulation) and the linears (which compute it)."""

    def __init__(self, record: FeatureRecord, plan: Plan, recorder: Recorder) -> None:
        self._record = record
        self._plan = plan
        self._store = GraphStore(recorder, entries=plan.settings.graphs, pool_bytes=plan.settings.graph_bytes)
        self._models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._failures = 0
        self._captured: weakref.WeakKeyDictionary[CapturedPass, _Captured] = weakref.WeakKeyDictionary()
        self._step: ContextVar[object | None] = ContextVar("step", default=None)
        self._linears: ContextVar[_LinearMode | None] = ContextVar("linears", default=None)

    @property
    def alive(self) -> int:
        """How many captured passes there are."""
        return len(self._store)

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool that they share; their inputs and results lie outside."""
        held: int = self._store.pool_bytes
        return held

    def wrap_step(self, run_denoising_step: Callable[..., Any]) -> Callable[..., Any]:
        """Within a step its passes share the modulation; after it, no table is valid."""

        @functools.wraps(run_denoising_step)
        def denoising_step(*args: Any, **kwargs: Any) -> Any:
            token = self._step.set(object())
            try:
                return run_denoising_step(*args, **kwargs)
            finally:
                self._step.reset(token)
                for model in self._models.values():
                    for table in model.tables.values():
                        table.source = None

        return denoising_step

    def wrap_linear(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A modulation linear's output is noted, or taken from the table, as the pass around it asks."""

        @functools.wraps(forward)
        def linear_forward(linear: nn.Module, x: Tensor) -> Any:
            mode = None if torch.compiler.is_compiling() else self._linears.get()
            if mode is None or linear not in mode.table.linears:
                return forward(linear, x)
            if mode.kind == "read":
                return mode.table.buffers[linear], None
            output, bias = forward(linear, x)
            if bias is None:
                mode.outputs[linear] = output
            return output, bias

        return linear_forward

    def wrap_pass(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The denoiser's forward: a replay where there is a graph for the call, else `forward`."""
        namespace = inspect.unwrap(forward).__globals__

        @functools.wraps(forward)
        def denoiser_forward(denoiser: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(denoiser, *args, **kwargs)
            try:
                found = self._look_at(denoiser, args, kwargs, namespace)
            except Ineligible as why:
                self._record.fall_back(str(why))
                return forward(denoiser, *args, **kwargs)
            return self._run(
                found,
                eager=lambda: forward(denoiser, **kwargs),
                work=lambda arguments: forward(denoiser, **arguments),
            )

        return denoiser_forward

    def _look_at(self, denoiser: nn.Module, args: Any, kwargs: dict[str, Any], namespace: dict[str, Any]) -> _Pass:
        if why := _left_to_stock(args, kwargs, namespace):
            raise Ineligible(why)
        if self._plan.guard.failures != self._failures:
            self._failures = self._plan.guard.failures
            self._forget_all()
        model = self._model(denoiser)
        if model.state.refusal:
            raise Ineligible(model.state.refusal)
        if model.state.has_hooks():
            raise Ineligible("a module has hooks")
        call = flatten(kwargs)
        if any(tensor.device not in model.state.devices for tensor in call.tensors):
            raise Ineligible("an argument is on another device than the denoiser")
        modes = _modes()
        source = self._source(kwargs, modes)
        table = self._table(model, denoiser, kwargs) if source else None
        reads = table is not None and bool(table.buffers) and source is not None and source.matches(table.source)
        signature = self._signature(model, call, modes, reads)
        return _Pass(model, signature, call, table, source, reads, _cached_by_stock(denoiser, kwargs, namespace))

    def _signature(self, model: _Model, call: FlatCall, modes: Hashable, reads: bool) -> _Signature:
        key = (call.signature, modes, reads)
        known = model.signatures.get(key)
        if known is None:
            if len(model.signatures) >= _MOST_SEEN:
                self._forget(model.number)  # by a signature that is forgotten, its graph could not be found
                model.signatures.clear()
            shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in call.tensors)
            digest = hashlib.sha256(repr(key).encode()).hexdigest()[:8]
            origin = ", modulation from the pass before" if reads else ""
            known = _Signature(model.number, f"denoiser {model.number}, {shapes} ({digest}{origin})")
            model.signatures[key] = known
        return known

    def _run(self, found: _Pass, *, eager: Callable[[], Any], work: Callable[[Any], Any]) -> Any:
        guard, id, signature = self._plan.guard, self._record.feature.id, found.signature
        if signature.given_up:
            self._record.fall_back(signature.given_up)
            return eager()
        if guard.verdict(id, signature.name) is Verdict.FAILED:
            self._record.fall_back("left to stock by the guard")
            return eager()
        captured = self._store.get(signature)
        if captured is None:
            if not signature.steady:
                return self._run_before_capture(found, eager)
            captured = self._capture(found, work)
            if captured is None:
                return eager()
            guard.withdraw(id, signature.name)  # every captured graph is checked, also one of a known signature
        checked = False

        def stock() -> Any:
            nonlocal checked
            checked = True
            return eager()

        result = guard.run(id, signature.name, fast=lambda: self._replay(found, captured), stock=stock)
        if not checked:  # else the eager pass has counted
            self._captured[captured].counts.add_to(self._plan)
            if found.table and found.reads:
                self._plan.records[_REUSE].hits += len(found.table.linears)
        return result

    def _run_before_capture(self, found: _Pass, eager: Callable[[], Any]) -> Any:
        checks = self._plan.guard.checks
        with self._linear_mode("observe", found.table) as mode:
            result = eager()
        if mode and found.table:
            found.table.observed = mode.outputs
        found.signature.steady = self._plan.guard.checks == checks
        if found.model.anew:
            self._record.fall_back(f"captured anew: {found.model.anew}")
            found.model.anew = ""
        elif found.signature.steady:
            self._record.fall_back("a signature's first call runs eagerly")
        else:
            self._record.fall_back("other features were still being checked")
        return result

    def _capture(self, found: _Pass, work: Callable[[Any], Any]) -> CapturedPass | None:
        table = found.table if found.table and (found.reads or found.table.make_buffers()) else None
        kind = "read" if found.reads else "write"

        def recorded(arguments: Any) -> Any:
            with self._linear_mode(kind, table) as mode:
                result = work(arguments)
            if mode and mode.outputs:
                buffers = [mode.table.buffers[linear] for linear in mode.outputs]
                torch._foreach_copy_(buffers, list(mode.outputs.values()))
            return result

        before = _Counts.of(self._plan)
        try:
            try:
                captured = self._store.capture(found.signature, found.call, recorded, (*found.keep, table))
            finally:
                done = _Counts.of(self._plan) - before
                before.restore(self._plan)  # a capture computes nothing; a replay counts what the captured pass did
        except TooLarge as why:
            self._give_up(found, str(why))
        except torch.OutOfMemoryError:
            self._store.clear()
            if found.signature.starved:
                self._give_up(found, "out of memory during capture, twice")
            else:
                found.signature.starved = True
                self._record.fall_back("out of memory during capture")
        except Exception as error:
            self._give_up(found, f"capture failed: {type(error).__name__}: {error}")
        else:
            self._captured[captured] = _Captured(done, fills=table is not None and not found.reads)
            return captured
        return None

    def _give_up(self, found: _Pass, why: str) -> None:
        found.signature.given_up = why
        self._record.fall_back(why)
        logger.warning("step_graph: %s runs eagerly from now on: %s", found.signature.name, why)

    def _replay(self, found: _Pass, captured: CapturedPass) -> Any:
        details = self._captured[captured]
        if found.table and details.fills:
            found.table.source = None
        result = captured.replay(found.call.tensors)
        if found.table and details.fills:
            found.table.source = found.source
        self._record.hit()
        return result

    def _model(self, denoiser: nn.Module) -> _Model:
        model, step = self._models.get(denoiser), self._step.get()
        why = None
        # LoRA switches and weight updates come between steps, never inside one: each is a request of its own.
        if model and (step is None or model.looked_at_in is not step):
            why = model.state.changed()
        if model and why:
            self._forget(model.number)
        if model is None or why:
            self._numbered += 1
            model = self._models[denoiser] = _Model(self._numbered, ModelState(denoiser), why or "")
            # By a weak reference: a plan that is dropped takes its graphs with it, though the denoiser lives on.
            weakref.finalize(denoiser, _forget_in, weakref.ref(self), model.number).atexit = False
        model.looked_at_in = step
        return model

    def _forget(self, number: int) -> None:
        self._store.drop(lambda signature: signature.model == number)

    def _forget_all(self) -> None:
        self._store.clear()
        for model in self._models.values():
            for signature in model.signatures.values():
                signature.steady = False

    def _source(self, kwargs: dict[str, Any], modes: Hashable) -> Source | None:
        """What this pass's modulation comes from, where a second pass may take it from the first."""
        step, timestep = self._step.get(), kwargs.get("timestep")
        reuse = self._plan.records.get(_REUSE)
        if step is None or not isinstance(timestep, Tensor) or not reuse:
            return None
        if reuse.state not in (State.ACTIVE, State.NATIVE):
            return None
        condition = kwargs.get("additional_t_cond")
        tensors = (timestep, condition) if isinstance(condition, Tensor) else (timestep,)
        return Source.of(tensors, (step, modes))

    def _table(self, model: _Model, denoiser: nn.Module, kwargs: dict[str, Any]) -> _Table | None:
        conditions = (kwargs["timestep"], kwargs.get("additional_t_cond"), kwargs.get("hidden_states"))
        layout = tuple((t.shape[:1], t.dtype) if isinstance(t, Tensor) else None for t in conditions)
        if layout not in model.tables:
            model.tables[layout] = _Table(modulation_linears(denoiser))
        return model.tables[layout] if model.tables[layout].linears else None

    @contextmanager
    def _linear_mode(self, kind: str, table: _Table | None) -> Iterator[_LinearMode | None]:
        mode = _LinearMode(kind, table) if table else None
        token = self._linears.set(mode)
        try:
            yield mode
        finally:
            self._linears.reset(token)


def _forget_in(graphs: "weakref.ref[StepGraphs]", number: int) -> None:
    if (living := graphs()) is not None:
        living._forget(number)


class _Counts:
    """How often each feature was hit and left to stock, as a difference or a state."""

    def __init__(self, hits: Counter[str], fallbacks: dict[str, Counter[str]]) -> None:
        self._hits, self._fallbacks = hits, fallbacks

    @classmethod
    def of(cls, plan: Plan) -> "_Counts":
        records = plan.records.items()
        return cls(
            Counter({id: record.hits for id, record in records}),
            {id: Counter(record.fallbacks) for id, record in records},
        )

    def __sub__(self, before: "_Counts") -> "_Counts":
        hits, fallbacks = self._hits - before._hits, {}
        for id, counts in self._fallbacks.items():
            if more := counts - before._fallbacks[id]:
                fallbacks[id] = more
        # The reuse of the modulation stands aside in a capture; in a replay it is the table's.
        hits.pop(_REUSE, None)
        fallbacks.pop(_REUSE, None)
        return _Counts(hits, fallbacks)

    def add_to(self, plan: Plan) -> None:
        for id, hits in self._hits.items():
            plan.records[id].hits += hits
        for id, fallbacks in self._fallbacks.items():
            plan.records[id].fallbacks.update(fallbacks)

    def restore(self, plan: Plan) -> None:
        for id, fallbacks in self._fallbacks.items():
            plan.records[id].hits = self._hits[id]
            plan.records[id].fallbacks = Counter(fallbacks)


def _modes() -> Hashable:
    """What decides about the launches and is no argument: dispatch modes, and the request's quality tier."""
    quality = getattr(getattr(_context().forward_batch, "sampling_params", None), "quality", None)
    return torch.is_inference_mode_enabled(), torch.get_default_dtype(), quality


def _context() -> Any:
    """SGLang's forward context; refused where there is none, since attention needs it."""
    from sglang.multimodal_gen.runtime.managers import forward_context

    if forward_context._forward_context is None:
        raise Ineligible("outside a forward context")
    return forward_context._forward_context


def _left_to_stock(args: Any, kwargs: dict[str, Any], namespace: dict[str, Any]) -> str | None:
    """Why this call must run eagerly, whatever the model; None if nothing speaks against a graph."""
    if args:
        return "arguments are passed by position"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast, which keeps casts of the weights only while it is on"
    if is_capturing():
        return "inside another CUDA graph capture"
    if namespace.get("is_in_breakable_cuda_graph", lambda: False)():
        return "inside SGLang's breakable CUDA graph"
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "hooks on all modules (torch.nn.modules.module.register_module_forward_hook)"
    if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
        return f"{ranks} ranks"
    context = _context()
    if context.attn_metadata is not None:
        return "attention metadata"
    if kwargs.get("encoder_hidden_states_mask") is not None:
        return "a text mask, whose lengths stock reads on the host"
    batch = context.forward_batch
    if getattr(batch, "enable_teacache", False):
        return "TeaCache"
    skip_softmax = sys.modules.get(_SKIP_SOFTMAX)
    if skip_softmax and batch is not None and skip_softmax.get_request_skip_softmax_params() is not None:
        return "skip-softmax attention, which depends on the step"
    return _by_server_args()


def _by_server_args() -> str | None:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    try:
        server_args = get_global_server_args()
    except ValueError:  # not set: no server
        return None
    return next((what for name, what in _SERVER_ARGS.items() if getattr(server_args, name, None)), None)


def _cached_by_stock(denoiser: Any, kwargs: dict[str, Any], namespace: dict[str, Any]) -> tuple[Any, ...]:
    """Tensors that stock's forward takes from its own cache, which may drop them while a graph still reads them."""
    if not getattr(denoiser, "zero_cond_t", False):
        return ()
    device = kwargs["timestep"].device
    return (denoiser.build_modulate_index(namespace["to_hashable"](kwargs["img_shapes"]), device),)
