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
one reads it there. A table belongs to the step and the timestep tensor that it was filled for; `modulation_ahead`
fills it for the steps to come as well (see `modulation_table`).
"""

import functools
import hashlib
import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sglang_fastpath.patches.diffusion.call_signature import FlatCall, Ineligible, flatten
from sglang_fastpath.patches.diffusion.graph_recorder import CudaGraphRecorder, Recorder
from sglang_fastpath.patches.diffusion.graph_store import CapturedPass, GraphStore, TooLarge
from sglang_fastpath.patches.diffusion.model_state import ModelState
from sglang_fastpath.patches.diffusion.modulation_table import (
    ROWS,
    LinearMode,
    ModulationTable,
    Step,
    modulation_input,
    rows_at_once,
    rows_one_by_one,
)
from sglang_fastpath.patches.diffusion.qwen_image_modulation import Source, modulation_linears
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sglang_fastpath.guard import Verdict, is_capturing
from sglang_fastpath.plan import FeatureRecord, Plan, State

logger = logging.getLogger("sglang_fastpath")

_REUSE = "cfg_mod_cache"
_AHEAD = "modulation_ahead"
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
    record = records.get("step_graph")
    if record is None:
        ahead = records[_AHEAD]
        ahead.take_out(ahead.ports[0], State.OFF, "it is step_graph's passes that share what is computed ahead")
        return {}
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
class _Model:
    """What is known of one denoiser, as long as it stays as `state` has seen it."""

    number: int
    state: ModelState
    anew: str = ""  # why the graphs from before were dropped, until a call has counted it
    looked_at_in: object = None  # the step in which the state was last compared
    tables: dict[Hashable, ModulationTable] = field(default_factory=dict)
    signatures: dict[Hashable, _Signature] = field(default_factory=dict)


@dataclass(frozen=True)
class _Captured:
    """What a graph does beside computing: what the features count in it, and the table that it fills, if it does,
    be it for one timestep or for those to come as well."""

    counts: "_Counts"
    fills: ModulationTable | None
    looks_ahead: bool


@dataclass(frozen=True)
class _Modulation:
    """A pass's modulation, where it is shared with other passes.

    `source`: what it is computed from; `given`: the part of that which the request's other steps have in common.
    `reads`: it is in the table; `foreseen`: an earlier step has computed it.
    """

    table: ModulationTable
    step: Step
    timestep: Tensor
    source: Source
    given: Source
    reads: bool
    foreseen: bool


@dataclass(frozen=True)
class _Pass:
    """One call that may be captured."""

    model: _Model
    signature: _Signature
    call: FlatCall
    shared: _Modulation | None
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
        self._step: ContextVar[Step | None] = ContextVar("step", default=None)
        self._linears: ContextVar[LinearMode | None] = ContextVar("linears", default=None)

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
        """Within a step its passes share the modulation; after it, no table is valid, and after the last one of a
        schedule nothing that was computed ahead."""

        @functools.wraps(run_denoising_step)
        def denoising_step(stage: Any, context: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
            current = Step(context.timesteps, step.step_index)
            token = self._step.set(current)
            failed = True
            try:
                result = run_denoising_step(stage, context, step, *args, **kwargs)
                failed = False
            finally:
                self._step.reset(token)
                for model in self._models.values():
                    for table in model.tables.values():
                        table.source = None
                        if table.ahead and (failed or current.is_last):
                            table.ahead.end_request(failed=failed)
            return result

        return denoising_step

    def wrap_linear(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A modulation linear's output is noted, or taken from the table, as the pass around it asks."""

        @functools.wraps(forward)
        def linear_forward(linear: nn.Module, x: Tensor) -> Any:
            mode = None if torch.compiler.is_compiling() else self._linears.get()
            if mode is None or linear not in mode.table.linears:
                return forward(linear, x)
            return mode.run(forward, linear, x)

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
            work = partial(_call_with, forward, denoiser)
            inputs = partial(modulation_input, denoiser, work)
            return self._run(found, eager=lambda: forward(denoiser, **kwargs), work=work, modulation_input=inputs)

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
        shared = self._modulation(model, denoiser, kwargs, modes)
        signature = self._signature(model, call, modes, reads=shared is not None and shared.reads)
        return _Pass(model, signature, call, shared, _cached_by_stock(denoiser, kwargs, namespace))

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

    def _run(
        self,
        found: _Pass,
        *,
        eager: Callable[[], Any],
        work: Callable[[Any], Any],
        modulation_input: Callable[[Any, Tensor], Tensor],
    ) -> Any:
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
            self._look_ahead(found, modulation_input)
            captured = self._capture(found, work, modulation_input)
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
            if found.shared and found.shared.reads and not found.shared.foreseen:
                self._plan.records[_REUSE].hit(len(found.shared.table.linears))
        return result

    def _run_before_capture(self, found: _Pass, eager: Callable[[], Any]) -> Any:
        checks = self._plan.guard.checks
        with self._linear_mode("observe", found.shared.table if found.shared else None) as mode:
            result = eager()
        if mode and found.shared:
            found.shared.table.observe(mode, found.shared.timestep)
        found.signature.steady = self._plan.guard.checks == checks
        if found.model.anew:
            self._record.fall_back(f"captured anew: {found.model.anew}")
            found.model.anew = ""
        elif found.signature.steady:
            self._record.fall_back("a signature's first call runs eagerly")
        else:
            self._record.fall_back("other features were still being checked")
        return result

    def _look_ahead(self, found: _Pass, modulation_input: Callable[[Any, Tensor], Tensor]) -> None:
        """Has the table filled for the timesteps to come as well, if that gives stock's bytes."""
        record, guard, shared = self._plan.records.get(_AHEAD), self._plan.guard, found.shared
        if record is None or record.state is not State.ACTIVE or shared is None or shared.reads:
            return
        table = shared.table
        if table.ahead or not table.make_buffers():
            return
        what = f"{found.model.number}, {len(table.linears)} linears, {ROWS} x {len(shared.timestep)} rows"
        signature = f"modulation of denoiser {what}"
        if guard.verdict(_AHEAD, signature) is Verdict.FAILED:
            return
        try:
            ahead = table.new_ahead(shared.step, shared.timestep)
            arguments = found.call.rebuild(found.call.tensors)
            inputs = [modulation_input(arguments, foreseen) for foreseen in ahead.foreseen]
            table.check_input(partial(modulation_input, arguments))
        except Ineligible as why:
            record.fall_back(str(why))
            return
        rows = partial(rows_at_once, table.linears, inputs), partial(rows_one_by_one, table.linears, inputs)
        guard.run(_AHEAD, signature, fast=rows[0], stock=rows[1])
        if guard.policy.mode == "off" or guard.verdict(_AHEAD, signature) is Verdict.ADMITTED:
            table.ahead = ahead

    def _capture(
        self, found: _Pass, work: Callable[[Any], Any], modulation_input: Callable[[Any, Tensor], Tensor]
    ) -> CapturedPass | None:
        reads = found.shared is not None and found.shared.reads
        table = found.shared.table if found.shared and (reads or found.shared.table.make_buffers()) else None
        filled = None if reads else table
        ahead = filled.ahead if filled else None

        def recorded(arguments: Any) -> Any:
            later = [modulation_input(arguments, foreseen) for foreseen in ahead.foreseen[1:]] if ahead else []
            with self._linear_mode("read" if reads else "write", table, later) as mode:
                result = work(arguments)
            if mode and mode.outputs:
                mode.table.store(mode.outputs)
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
            self._captured[captured] = _Captured(done, filled, looks_ahead=ahead is not None)
            return captured
        return None

    def _give_up(self, found: _Pass, why: str) -> None:
        found.signature.given_up = why
        self._record.fall_back(why)
        logger.warning("step_graph: %s runs eagerly from now on: %s", found.signature.name, why)

    def _replay(self, found: _Pass, captured: CapturedPass) -> Any:
        details, shared = self._captured[captured], found.shared
        filled: ModulationTable | None = details.fills
        ahead = filled.ahead if filled and details.looks_ahead else None
        if filled:
            filled.source = None
        if ahead:
            ahead.forget()
        if ahead and shared:
            ahead.foresee(shared.step, shared.timestep)
        result = captured.replay(found.call.tensors)
        if filled and shared:  # a pass outside a step fills the table, too, but for nobody
            filled.source = shared.source
            if ahead:
                ahead.computed(shared.given)
        self._record.hit()
        if shared and shared.foreseen:
            self._plan.records[_AHEAD].hit(len(shared.table.linears))
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

    def _modulation(
        self, model: _Model, denoiser: nn.Module, kwargs: dict[str, Any], modes: Hashable
    ) -> _Modulation | None:
        """Where this pass's modulation comes from, if a second pass may take it from the first."""
        step, timestep, condition = self._step.get(), kwargs.get("timestep"), kwargs.get("additional_t_cond")
        reuse = self._plan.records.get(_REUSE)
        if step is None or not isinstance(timestep, Tensor) or not reuse:
            return None
        if reuse.state not in (State.ACTIVE, State.NATIVE):
            return None
        table = self._table(model, denoiser, kwargs)
        if table is None:
            return None
        tensors = [tensor for tensor in (step.timesteps, condition) if isinstance(tensor, Tensor)]
        given = Source.of(tensors, modes)
        source = Source.of([timestep, *tensors], (step, modes))
        reads, foreseen = bool(table.buffers) and source.matches(table.source), False
        if table.buffers and not reads and table.take_foreseen(step, timestep, given):
            table.source, reads, foreseen = source, True, True
        return _Modulation(table, step, timestep, source, given, reads, foreseen)

    def _table(self, model: _Model, denoiser: nn.Module, kwargs: dict[str, Any]) -> ModulationTable | None:
        conditions = (kwargs["timestep"], kwargs.get("additional_t_cond"), kwargs.get("hidden_states"))
        layout = tuple((t.shape[:1], t.dtype) if isinstance(t, Tensor) else None for t in conditions)
        if layout not in model.tables:
            model.tables[layout] = ModulationTable(modulation_linears(denoiser))
        return model.tables[layout] if model.tables[layout].linears else None

    @contextmanager
    def _linear_mode(
        self, kind: str, table: ModulationTable | None, later: Sequence[Tensor] = ()
    ) -> Iterator[LinearMode | None]:
        mode = LinearMode(kind, table, later) if table else None
        token = self._linears.set(mode)
        try:
            yield mode
        finally:
            self._linears.reset(token)


def _call_with(forward: Callable[..., Any], denoiser: nn.Module, arguments: Mapping[str, Any]) -> Any:
    return forward(denoiser, **arguments)


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
