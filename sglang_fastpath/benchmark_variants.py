"""What `bench denoiser` compares: ways to serve one denoiser, the plugin's and those that SGLang has itself.

A variant is on only while `applied` is open, so that all of them can take turns on the same denoiser.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from sglang_fastpath import contracts, envs, plugin
from sglang_fastpath.denoising_loop import AroundPass, DenoisingLoop
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.flux2_loop import Flux2Loop
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import Plan, State, make_plan

STEP_GRAPH = "step_graph"
# What does something in captured passes alone: left out of eager variants, where nothing of it would show.
IN_GRAPHS = (STEP_GRAPH, "modulation_ahead")
FEATURES = tuple(feature for feature in CATALOGUE if feature.serves("diffusion"))


class VariantError(RuntimeError):
    """This variant cannot run here; the message says why."""


class Variant:
    """Stock, eager; with a `plan`, the plugin's features that it names.

    Without the `required` features it would be another variant under this one's name.
    """

    settings: ClassVar[dict[str, Any]] = {}
    """SGLang's server arguments that are not at their default."""
    setup = ""
    """What a reader must know about how it was set up."""

    def __init__(self, plan: Plan | None = None, *, required: Sequence[str] = ()) -> None:
        self.plan = plan
        self._required = required

    def prepare(self, denoiser: nn.Module, **size: Any) -> None:
        """Does once what a server does before it serves; `size` is that of the loops to come.

        Raises:
            VariantError: if it cannot run here.
        """
        for id in self._required:
            record = self.plan.records.get(id) if self.plan else None
            if record is None or record.state is not State.ACTIVE:
                raise VariantError(f"{id}: {f'{record.state} ({record.reason})' if record else 'no such feature'}")

    def loop(
        self, denoiser: nn.Module, *, steps: int, around_pass: AroundPass | None = None, **size: Any
    ) -> DenoisingLoop:
        family = Flux2Loop if type(denoiser).__name__ == "Flux2Transformer2DModel" else GuidanceLoop
        return family(denoiser, steps=steps, settings=self.settings, around_pass=around_pass, **size)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Serves this way while open, and leaves every original object behind."""
        if self.plan is None:
            yield
            return
        plugin.apply(self.plan)
        try:
            yield
        finally:
            plugin.deactivate()

    def verify(self) -> None:
        """To be asked after a guidance run.

        Raises:
            VariantError: if a required feature did nothing in it.
        """
        for id in self._required:
            assert self.plan is not None
            record = self.plan.records[id]
            if not record.hits:
                raise VariantError(f"{id}: {self.plan.described(record)}; fallbacks: {dict(record.fallbacks)}")


class Compiled(Variant):
    """SGLang's torch.compile with its own settings, by the stage's own method.

    Where the release can, by regions: 60 blocks in one graph take very long to compile. Qwen-Image names no regions
    of its own, so they are those that it names for FSDP, as other models of SGLang have it: the blocks.
    """

    settings: ClassVar[dict[str, Any]] = {"enable_torch_compile": True, "regional_compile": True}

    def __init__(self) -> None:
        super().__init__()
        self._compiled: dict[nn.Module, Any] = {}
        self._inductor: dict[str, Any] = {}

    def prepare(self, denoiser: nn.Module, **size: Any) -> None:
        import torch._inductor.config as inductor

        if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            raise VariantError("torch.compile is switched off here")
        config_before = inductor.get_config_copy()
        compiled_before = {module for module in denoiser.modules() if "_compiled_call_impl" in vars(module)}
        self.setup = _compile(self.loop(denoiser, steps=1).stage, denoiser)
        # What was compiled is kept here, off the modules and out of inductor's settings until it is this one's turn.
        self._compiled = {
            module: vars(module).pop("_compiled_call_impl")
            for module in denoiser.modules()
            if "_compiled_call_impl" in vars(module) and module not in compiled_before
        }
        for name, value in inductor.get_config_copy().items():
            if value != config_before[name]:
                self._inductor[name] = value
                setattr(inductor, name, config_before[name])
        if not self._compiled:
            raise VariantError("SGLang compiled nothing")

    @contextmanager
    def applied(self) -> Iterator[None]:
        import torch._inductor.config as inductor

        for module, call in self._compiled.items():
            vars(module)["_compiled_call_impl"] = call
        try:
            with inductor.patch(self._inductor):
                yield
        finally:
            for module in self._compiled:
                # Deleted, not None: CUDA graphs take a module with one more attribute for another module.
                del vars(module)["_compiled_call_impl"]


def _compile(stage: Any, denoiser: nn.Module) -> str:
    """Calls the stage's own method; returns what it compiled, in words."""
    if not hasattr(stage, "_maybe_torch_compile"):  # up to 0.5.11
        stage._maybe_enable_torch_compile(denoiser)
        return "torch.compile of the whole denoiser"
    from sglang.multimodal_gen.runtime.utils.torch_compile import CompiledModuleRegistry

    stage._torch_compile_registry = CompiledModuleRegistry()
    if not hasattr(CompiledModuleRegistry, "compile_regions_once"):
        stage._maybe_torch_compile(denoiser)
        return "torch.compile of the whole denoiser"
    named: Any = getattr(denoiser, "_compile_conditions", ())
    if named:
        stage._maybe_torch_compile(denoiser)
        return "regional_compile of the regions that the model names"
    model: Any = denoiser
    model._compile_conditions = list(model._fsdp_shard_conditions)
    try:
        stage._maybe_torch_compile(denoiser)
    finally:
        del model._compile_conditions
    return "regional_compile; the model names no regions, so those that it names for FSDP: its blocks"


class BreakableGraphs(Variant):
    """SGLang's breakable CUDA graphs, captured by its own runner in a warm-up request, for these prompt lengths."""

    settings: ClassVar[dict[str, Any]] = {"enable_breakable_cuda_graph": True}
    setup = "graphs for this resolution and prompt length alone"

    def __init__(self) -> None:
        super().__init__()
        # SGLang keeps these for as long as its stage lives, here they outlive it.
        self._runners: dict[Any, Any] = {}

    def prepare(self, denoiser: nn.Module, **size: Any) -> None:
        loop = self.loop(denoiser, steps=1, **size)
        if not hasattr(loop.stage, "_bcg_run"):
            release = contracts.installed_release()
            raise VariantError(f"SGLang {release.version if release else '?'} has no breakable CUDA graphs")
        loop.batch.is_warmup = True
        for _ in loop:
            pass
        # SGLang logs why a capture failed, and serves eagerly then.
        if not any(runner.entries for runner in self._runners.values()):
            raise VariantError("SGLang captured no graph; its log says why")

    def loop(
        self, denoiser: nn.Module, *, steps: int, around_pass: AroundPass | None = None, **size: Any
    ) -> DenoisingLoop:
        loop = super().loop(denoiser, steps=steps, around_pass=around_pass, **size)
        loop.stage._bcg_runners = self._runners
        # --bcg-text-buckets, which SGLang reads from global arguments that a denoiser alone does not have.
        buckets = loop.text_tokens
        loop.stage._bcg_text_buckets = lambda: buckets
        return loop


def only(*on: str, emulate: bool = False) -> Plan:
    """The plan in which exactly these features are switched on; `emulate`: with the FP8 linear emulated."""
    settings = envs.Settings(enabled=True, emulate=emulate, switches={f.id: f.id in on for f in FEATURES})
    return make_plan(settings, contracts.installed_release(), catalogue=FEATURES)


def make_variants(model: str, *, ablation: bool = True, emulate: bool = False) -> dict[str, Variant]:
    """The eager ones: stock, every feature on; for the ablation each active one alone, and every other one.

    `model`: features that are not for it are not ablated.
    """
    eager = [feature.id for feature in FEATURES if feature.id not in IN_GRAPHS]
    fast = only(*eager, emulate=emulate)
    variants = {"stock": Variant(), "fast": Variant(fast)}
    ids = [record.feature.id for record in fast.active() if not record.feature.lacks(model)]
    for id in ids if ablation else ():
        variants[f"alone {id}"] = Variant(only(id, emulate=emulate))
        variants[f"without {id}"] = Variant(only(*(other for other in ids if other != id), emulate=emulate))
    return variants


def make_graph_variants(names: Sequence[str] | None = None) -> dict[str, Variant]:
    """Eager, compiled, in graphs: stock with what it has itself, and with the plugin; or those named, and stock."""
    features = [feature.id for feature in FEATURES]
    native = [id for id, record in only(*features).records.items() if record.state is State.NATIVE]
    variants = {
        "stock": Variant(),
        "stock+compile": Compiled(),
        "stock+bcg": BreakableGraphs(),
        "stock+graph": Variant(only(STEP_GRAPH, *native), required=[STEP_GRAPH]),
        "fast": Variant(only(*(id for id in features if id not in IN_GRAPHS))),
        "fast+graph": Variant(only(*features), required=[STEP_GRAPH]),
    }
    wanted = variants.keys() if names is None else {"stock", *names}
    return {name: variant for name, variant in variants.items() if name in wanted}
