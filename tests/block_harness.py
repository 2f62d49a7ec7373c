"""What the tests of the fused denoiser blocks share: small denoisers in block FP8 on a CPU, passes compared with
stock's bytes, launches counted, and what can be done to a denoiser between two passes.

A `Family` says what is particular to a family of models; its `check_...` are the tests that all families have.
"""

import copy
import functools
import gc
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from denoiser_calls import call
from safetensors.torch import load_file, save_file
from sglang_fastpath.patches.diffusion import block_steps, fp8_cpu_emulation
from stock_chains import assert_same_bytes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_fastpath import contracts, envs, hooks, plan, plugin
from sglang_fastpath.denoisers import start_runtime
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.plan import FeatureRecord, Plan, State

AHEAD = "norm computed ahead"
HOOKS = ("register_forward_hook", "register_forward_pre_hook")
FLAGS = ("dit_cpu_offload", "dit_layerwise_offload", "use_fsdp_inference")

launches: Counter[str] = Counter()  # in the latest pass: by kernel, by kernel and flag, and of norms computed ahead
refusals: list[str] = []  # why a kernel that was launched should not have been

CanUse = Callable[[Any], str | None]


# --- plans and passes ----------------------------------------------------------------------------------------------


@contextmanager
def emulated() -> Iterator[None]:
    """The FP8 linear in torch, on one thread: the operations are too small to share."""
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    revert()


@functools.cache
def everything() -> Plan:
    """What can be active at all: to find out, SGLang's sources are read, which takes longer than a pass."""
    switches = {feature.id: True for feature in CATALOGUE}
    return plan.make_plan(envs.Settings(enabled=True, emulate=True, switches=switches), contracts.installed_release())


def make_plan(on: Sequence[str], *, guard: str = "once", strict: bool = False) -> Plan:
    """As `plan.make_plan` makes it with the features of `on` switched on, and all others off."""
    switches = {feature.id: feature.id in on for feature in CATALOGUE}
    new = replace(everything().settings, switches=switches, guard=guard, strict=strict)
    records = {}
    for id, known in everything().records.items():
        off = new.off_because(id)
        state, reason = (State.OFF, off) if off else (known.state, known.reason)
        records[id] = FeatureRecord(known.feature, state, reason, out=dict(known.out))
    return Plan(new, everything().release, records)


@contextmanager
def applied(new: Plan) -> Iterator[Plan]:
    plugin.apply(new)
    try:
        yield new
        assert not refusals
    finally:
        plugin.deactivate()


def infer(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    launches.clear()
    with torch.inference_mode():
        return call(model, inputs)


def stock_output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What stock gives now. A plan in force is put aside meanwhile, and applied again."""
    current = plan.current()
    plugin.deactivate()
    try:
        return infer(model, inputs)
    finally:
        if current is not None:
            plugin.apply(current)


def assert_like_stock(model: nn.Module, inputs: dict[str, Any], *, passes: int | None = None) -> int:
    """Compares so many passes with stock, or as many as the guard needs until it only trusts; returns how many."""
    stock = stock_output(model, inputs)
    current = plan.current()
    assert current is not None
    for count in range(1, passes or 12):
        checks = current.guard.counters["checks"]
        assert_same_bytes(infer(model, inputs), stock)
        if not passes and current.guard.counters["checks"] == checks:
            return count
    assert passes, "the guard goes on checking the same request"
    assert_same_bytes(infer(model, inputs), stock)
    return passes


def failed(new: Plan) -> list[dict[str, Any]]:
    return [verdict for verdict in new.guard.verdicts if verdict["verdict"] != "admitted"]


def signatures(new: Plan) -> str:
    return "\n".join(verdict["signature"] for verdict in new.guard.verdicts)


def blocks_of(model: nn.Module, name: str) -> list[Any]:
    blocks: Any = model.get_submodule(name)
    return list(blocks)


@contextmanager
def call_context() -> Iterator[None]:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    with set_forward_context(current_timestep=0, attn_metadata=None):
        yield


def block_inputs(model: nn.Module, path: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the block at `path` is given in a pass."""
    seen: list[dict[str, Any]] = []
    hook = model.get_submodule(path).register_forward_pre_hook(
        lambda block, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    infer(model, inputs)
    hook.remove()
    return seen[0]


# --- what is done to a denoiser ------------------------------------------------------------------------------------


def low_rank(linear: Any, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4, linear.input_size, generator=generator).bfloat16()
    b = (0.1 * torch.randn(linear.output_size, 4, generator=generator)).bfloat16()
    return a, b


def doubled(output: Any) -> Any:
    """The first tensor of what a module returned, doubled."""
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


class Doubled(nn.Module):
    """Around any module, without its attributes but for those that stock's or our code reads of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for name in ("eps", "variance_epsilon", "weight"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        if hasattr(inner, "norm"):
            self.norm = inner.norm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return doubled(self.inner(*args, **kwargs))


def copy_into(owner: nn.Module, name: str, value: Tensor) -> None:
    parameter = owner._parameters[name]
    assert parameter is not None
    parameter.data.copy_(value)


def new_data(owner: nn.Module, name: str, value: Tensor) -> None:
    parameter = owner._parameters[name]
    assert parameter is not None
    parameter.data = value


def new_parameter(owner: nn.Module, name: str, value: Tensor) -> None:
    setattr(owner, name, nn.Parameter(value, requires_grad=False))


def misaligned(tensor: Tensor) -> Tensor:
    """A copy that does not start at a multiple of 16 bytes."""
    moved = torch.empty(tensor.numel() + 4, dtype=tensor.dtype)[4:].view(tensor.shape)
    return moved.copy_(tensor)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float()


def tensors_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple):
        for part in output:
            yield from tensors_of(part)


@contextmanager
def class_forward(model: nn.Module, blocks: str, change: Callable[[Any], Any]) -> Iterator[Callable[..., Any]]:
    """Another function in the place of the blocks' forward, as a plugin that knows nothing of us would put it."""
    block_type: Any = type(blocks_of(model, blocks)[0])
    before = block_type.forward
    ours = hooks._replacements.get(id(before))

    def forward(block: nn.Module, **kwargs: Any) -> Any:
        return change(before(block, **kwargs))

    block_type.forward = forward
    try:
        yield forward
    finally:
        # The plugin may have gone meanwhile; to put its replacement back would bring it into later tests.
        block_type.forward = ours.live() if ours else before


# --- families ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Family:
    """One family of models with fused blocks.

    `build(**arch)` gives a small denoiser, in block FP8 unless told otherwise, and `inputs(model)` what a pass of it
    is given. `blocks`: by the name of a list of blocks in the model, which features have a step in each of them.
    `ahead_by`: the feature that computes the next block's norm. `forward`: the patch's module, which calls `kernels`,
    launchers with the `can_use` of the streams that they are given, and `gemms`.
    """

    build: Callable[..., Any]
    inputs: Callable[[nn.Module], dict[str, Any]]
    blocks: Mapping[str, tuple[str, ...]]
    ahead_by: str
    forward: ModuleType
    kernels: Mapping[str, CanUse]
    gemms: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(id for ids in self.blocks.values() for id in ids))

    @property
    def launchers(self) -> tuple[str, ...]:
        return (*self.kernels, *self.gemms)

    def users_of(self, launcher: str) -> list[Any]:
        """The modules that a block's forward calls it from."""
        return [module for module in (self.forward, block_steps) if hasattr(module, launcher)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts `launches`. `applied` fails if a kernel was given what its `can_use` refuses."""
        refusals.clear()

        def counting(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
            def launcher(*args: Any, **kwargs: Any) -> Any:
                launches.update([name, *(f"{name} {flag}" for flag, value in kwargs.items() if value is True)])
                if name in self.kernels:
                    streams = (argument for argument in args if isinstance(argument, tuple))
                    refusals.extend(f"{name}: {why}" for s in streams if (why := self.kernels[name](s)))
                return launch(*args, **kwargs)

            return launcher

        def ahead(*args: Any) -> Any:
            launches[AHEAD] += 1
            return made(*args)

        made = self.forward.Ahead
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.forward, "Ahead", ahead)
            for name in self.launchers:
                for module in self.users_of(name):
                    patched.setattr(module, name, counting(name, getattr(module, name)))
            yield

    def make_plan(self, on: Sequence[str] | None = None, *, guard: str = "once", strict: bool = False) -> Plan:
        return make_plan(self.features if on is None else on, guard=guard, strict=strict)

    @contextmanager
    def fastpath(self, on: Sequence[str] | None = None, *, guard: str = "once") -> Iterator[Plan]:
        with applied(self.make_plan(on, guard=guard)) as new:
            yield new

    def hits(self, new: Plan) -> dict[str, int]:
        return {id: new.records[id].hits for id in self.features}

    def new_hits(self, new: Plan, model: nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
        """How many blocks of one more pass each feature ran in."""
        before = self.hits(new)
        infer(model, inputs)
        return {id: count - before[id] for id, count in self.hits(new).items()}

    def each(self, *calls: int, on: Sequence[str] | None = None) -> dict[str, int]:
        """The hits of so many calls of each kind of block, by feature; `on`: the features that run."""
        on = self.features if on is None else on
        counts = Counter({id: 0 for id in self.features})
        for ids, count in zip(self.blocks.values(), calls, strict=True):
            counts.update({id: count for id in ids if id in on})
        return dict(counts)

    def per_pass(
        self, model: nn.Module, *, on: Sequence[str] | None = None, stock: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The hits of one pass; `stock`: how many blocks of a kind are left to stock."""
        left = stock or {}
        return self.each(*(len(blocks_of(model, name)) - left.get(name, 0) for name in self.blocks), on=on)

    def served(self, model: nn.Module, passes: int, **what: Any) -> dict[str, int]:
        """The hits of so many passes; see `per_pass`."""
        return {id: passes * count for id, count in self.per_pass(model, **what).items()}

    def fallbacks(self, new: Plan, on: Sequence[str] | None = None) -> dict[str, int]:
        """Fallbacks by reason, which must be the same for all features in `on`."""
        counts = [dict(new.records[id].fallbacks) for id in (self.features if on is None else on)]
        assert all(count == counts[0] for count in counts)
        return counts[0]

    def in_vain(self, new: Plan) -> int:
        return sum(count for why, count in new.records[self.ahead_by].fallbacks.items() if "in vain" in why)

    def others(self, *without: str) -> tuple[str, ...]:
        return tuple(id for id in self.features if id not in without)

    @contextmanager
    def failing(self, name: str, error: Exception) -> Iterator[Counter[str]]:
        """The launcher `name` scribbles over what it wrote and raises; counts its calls."""
        calls: Counter[str] = Counter()

        def scribble(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            calls[name] += 1
            returned = launch(*args, **kwargs)
            written = args[0][:2] if returned is None else returned  # q and k, in place
            for tensor in tensors_of(written):
                tensor.fill_(math.nan)
            raise error

        with pytest.MonkeyPatch.context() as patched:
            for module in self.users_of(name):
                patched.setattr(module, name, functools.partial(scribble, getattr(module, name)))
            yield calls

    # Tests that every family has.

    def check_a_call_is_left_to_stock(
        self, reason: str, run: Callable[[], object], on: Sequence[str] | None = None
    ) -> None:
        """`run` calls a block; `on`: the features of such blocks."""
        with torch.inference_mode(), call_context():
            stock = run()
            with self.fastpath() as new:
                for _ in range(2):
                    assert_same_bytes(run(), stock)
                assert not any(self.hits(new).values())
                ((why, count),) = self.fallbacks(new, on).items()
        assert reason in why
        assert count == 2

    def check_lora_comes_changes_and_goes(self, path: str) -> None:
        """On a linear of the model."""
        from sglang.multimodal_gen.runtime.layers.lora.linear import replace_submodule, wrap_with_lora_layer

        model = self.build()
        kind, _, in_block = path.split(".", 2)
        inputs = self.inputs(model)
        bare = infer(model, inputs)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            linear = model.get_submodule(path)
            wrapper = wrap_with_lora_layer(linear, lora_rank=4, lora_alpha=8)
            replace_submodule(model, path, wrapper)
            outputs = [bare]
            for stage in range(4):
                if stage:
                    wrapper.set_lora_weights(*low_rank(linear, stage), clear_existing=True, merge_weights=stage == 3)
                    outputs.append(stock_output(model, inputs))
                assert_like_stock(model, inputs, passes=2)
            counted = self.fallbacks(new, self.blocks[kind])
            assert counted == {f"{in_block} is a {type(wrapper).__name__}": 8}, "of one block, in eight passes"
            assert self.new_hits(new, model, inputs) == self.per_pass(model, stock={kind: 1})

            replace_submodule(model, path, linear)  # with the last adapter merged into its weight
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            wrapper.unmerge_lora_weights()
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert_same_bytes(infer(model, inputs), bare)
            assert not failed(new)
        assert len({output.view(torch.uint8).numpy().tobytes() for output in outputs}) == 4, "each adapter counts"

    def check_hooks_run_as_often_as_in_stock(
        self, register: str, path: str, *, some: set[str], skipped: tuple[str, ...] = ()
    ) -> None:
        """On every module of the block at `path` in turn, those whose name ends like one of `skipped` left out."""
        model = self.build()
        modules = {name: m for name, m in model.get_submodule(path).named_modules() if not name.endswith(skipped)}
        inputs = self.inputs(model)
        runs: Counter[str] = Counter()

        def hook(name: str) -> Any:
            return getattr(modules[name], register)(lambda *_: runs.update([name]))

        handles = [hook(name) for name in modules]
        infer(model, inputs)
        stock = dict(runs)
        for handle in handles:
            handle.remove()
        runs.clear()
        wrong = {}
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            for name in modules:
                handle = hook(name)
                infer(model, inputs)
                handle.remove()
                if runs[name] < stock.get(name, 0):
                    wrong[name] = runs[name]
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert not failed(new)
        assert some <= stock.keys()
        assert not wrong, f"ran less often than {stock}"

    def check_hooks_that_change_what_a_module_returns(self, *paths: str) -> None:
        model = self.build()
        inputs = self.inputs(model)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            bare = infer(model, inputs)
            for path in paths:
                with model.get_submodule(path).register_forward_hook(lambda module, args, output: doubled(output)):
                    assert_like_stock(model, inputs, passes=3)
                    assert not torch.equal(infer(model, inputs), bare), path
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert not failed(new)

    def check_hooks_that_write_between_two_blocks(self, hook: Callable[[Any], Any]) -> None:
        """In place: the next block is given the very tensors that one returned, with other values. `hook` registers
        such a hook on a model and returns its handle."""
        model = self.build()
        inputs = self.inputs(model)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            bare = infer(model, inputs)
            with hook(model):
                assert_like_stock(model, inputs)
                assert not torch.equal(infer(model, inputs), bare)
                assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert_like_stock(model, inputs)
            assert not failed(new)

    def check_global_hooks_see_every_module(self, model: nn.Module) -> None:
        """`register_module_forward_hook`: profilers and debuggers hook all modules of the process."""
        inputs = self.inputs(model)
        runs: Counter[str] = Counter()
        names = {module: name for name, module in model.named_modules()}

        def passes_seen() -> dict[str, int]:
            runs.clear()
            handle = nn.modules.module.register_module_forward_hook(lambda module, *_: runs.update([names[module]]))
            with handle:
                infer(model, inputs)
            return dict(runs)

        stock = passes_seen()
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            assert passes_seen() == stock
            reasons = {why for id in self.features for why in new.records[id].fallbacks}
        assert reasons == {"hooks on all modules (torch.nn.modules.module.register_module_forward_hook)"}

    def check_a_forward_replaced_on_one_module_is_noticed(self, path: str) -> None:
        """As LoRA networks and offloading tools outside SGLang do it."""
        model = self.build()
        inputs = self.inputs(model)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            bare = infer(model, inputs)
            module = model.get_submodule(path)
            original = module.forward
            module.forward = lambda *args, **kwargs: doubled(original(*args, **kwargs))
            assert not torch.equal(stock_output(model, inputs), bare)
            assert_like_stock(model, inputs, passes=3)
            del module.forward
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert not failed(new)

    def check_a_replaced_module_is_noticed(self, path: str, on: Sequence[str] | None = None) -> None:
        """By one of another class, which is refused, and by one of its own class, which does something else."""
        model = self.build()
        inputs = self.inputs(model)
        parent, _, name = path.rpartition(".")
        modules = model.get_submodule(parent)._modules
        with self.fastpath(on) as new:
            assert_like_stock(model, inputs)
            bare = infer(model, inputs)
            original: Any = modules[name]
            modules[name] = Doubled(original)
            assert not torch.equal(stock_output(model, inputs), bare)
            assert_like_stock(model, inputs, passes=2)
            refused = [id for id in self.features if new.records[id].fallbacks]
            assert set(refused) == set(self.features if on is None else on) & set(self.blocks[path.partition(".")[0]])
            assert not failed(new)
            modules[name] = original
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model, on=on)

            kind = type(original)
            modules[name] = other = object.__new__(
                type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": _twice(kind)})
            )
            vars(other).update(vars(original))
            assert_like_stock(model, inputs, passes=2)
            modules[name] = original
            assert_like_stock(model, inputs)

    def check_norms_with_another_epsilon(
        self, path: str, names: Sequence[str], on: Sequence[str] | None = None
    ) -> None:
        """In place of all norms of the block at `path`: the block before knew it by the old ones."""
        model = self.build()
        inputs = self.inputs(model)
        block = model.get_submodule(path)
        with self.fastpath(on) as new:
            assert_like_stock(model, inputs)
            bare = infer(model, inputs)
            assert launches[AHEAD]
            for name in names:
                norm = copy.deepcopy(block.get_submodule(name))
                for module in norm.modules():
                    module.eps = 0.5
                block._modules[name] = norm
            assert not torch.equal(stock_output(model, inputs), bare)
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model, on=on)
            assert launches[AHEAD]
            assert not failed(new)

    def check_a_qk_norm_whose_weight_cannot_be_read(
        self, path: str, name: str, change: Callable[[Tensor], Tensor]
    ) -> None:
        """By the kernels: a dtype or an alignment that they refuse, in one block of many at `path`."""
        model = self.build()
        inputs = self.inputs(model)
        norm: Any = model.get_submodule(f"{path}.{name}")
        weight = norm.weight.data
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            for put in (new_parameter, new_data):
                put(norm, "weight", change(weight))
                assert_like_stock(model, inputs, passes=2)
                left = {path.partition(".")[0]: 1}
                assert self.new_hits(new, model, inputs) == self.per_pass(model, stock=left)
                new_parameter(norm, "weight", weight)
                assert_like_stock(model, inputs)
                assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert not failed(new)

    def check_a_changed_parameter_is_used_at_once(self, path: str) -> None:
        model = self.build()
        inputs = self.inputs(model)
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            output = infer(model, inputs)
            for change in (copy_into, new_data, new_parameter, copy_into):
                value, before = module.get_parameter(name).data, output
                change(module, name, (0.5 * value.float()).to(value.dtype))
                assert_like_stock(model, inputs, passes=1)
                output = infer(model, inputs)
                assert not torch.equal(output, before), change.__name__
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            assert not failed(new)

    def check_reloaded_weights_are_as_loaded_afresh(self, *, assign: bool) -> None:
        model, another = self.build(), self.build(seed=1)
        states = [{name: value.clone() for name, value in m.state_dict().items()} for m in (model, another)]
        inputs = self.inputs(model)
        fresh = [infer(m, inputs) for m in (model, another)]
        assert not torch.equal(*fresh)
        with self.fastpath() as new:
            for index in (0, 1, 0, 1):
                model.load_state_dict({name: value.clone() for name, value in states[index].items()}, assign=assign)
                for _ in range(2):
                    assert_same_bytes(infer(model, inputs), fresh[index])
            assert self.hits(new) == self.served(model, 4 * 2)
            assert not failed(new)

    def check_parameters_that_move_in_every_pass_leave_nothing_behind(self) -> None:
        """What an offload of the whole denoiser between requests amounts to."""
        model = self.build()
        inputs = self.inputs(model)
        stock = infer(model, inputs)
        left: list[StorageWeakRef] = []
        with self.fastpath() as new:
            for _ in range(4):
                left += [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
                assert_same_bytes(infer(model, inputs), stock)
            assert self.hits(new) == self.served(model, 4)
            assert not failed(new)
            gc.collect()
            assert all(storage.expired() for storage in left), "no merged tensor outlives its parameters"

    def check_layerwise_offload_keeps_the_linears_apart(self) -> None:
        """Hooks fetch a block's weights before it runs, and drop them after it."""
        model = self.build()
        inputs = self.inputs(model)
        stock = infer(model, inputs)
        blocks = [block for name in self.blocks for block in blocks_of(model, name)]
        host = {parameter: parameter.data for block in blocks for parameter in block.parameters()}

        def fetch(block: nn.Module, *_: Any) -> None:
            for parameter in block.parameters():
                parameter.data = host[parameter].clone()

        def drop(block: nn.Module, *_: Any) -> None:
            for parameter in block.parameters():
                parameter.data = torch.empty(1, dtype=parameter.dtype)

        for block in blocks:
            drop(block)
            block.register_forward_pre_hook(fetch)
            block.register_forward_hook(drop)
        with self.fastpath() as new:
            for _ in range(4):
                assert_same_bytes(infer(model, inputs), stock)
            checks = new.guard.counters["checks"]
            assert_same_bytes(infer(model, inputs), stock)
            assert new.guard.counters["checks"] == checks, "a block whose weights moved is the same block"
            assert self.hits(new) == self.served(model, 5, on=self.others("scale_prepack"))
            assert any("layerwise offload" in why for why in new.records["scale_prepack"].fallbacks)
            assert not launches[AHEAD], "the next block has no weights yet"
            assert not failed(new)

    def check_offload_by_flag_keeps_the_linears_apart(self, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
        from sglang.multimodal_gen.runtime.server_args import get_global_server_args

        monkeypatch.setattr(get_global_server_args(), flag, True)
        model = self.build()
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        with self.fastpath() as new:
            assert_like_stock(model, self.inputs(model), passes=2)
            assert self.hits(new) == self.served(model, 2, on=self.others("scale_prepack"))
            assert any(f"--{flag.replace('_', '-')}" in why for why in new.records["scale_prepack"].fallbacks)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses

    def check_merging_changes_nothing_that_is_saved(self, folder: Path) -> None:
        model = self.build()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        parameters = dict(model.named_parameters())
        addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        with self.fastpath():
            assert_like_stock(model, self.inputs(model))
        after = model.state_dict()
        assert any(after[name].data_ptr() != address for name, address in addresses.items()), "nothing was merged"
        assert dict(model.named_parameters()) == parameters, "the same objects under the same names"
        assert list(after) == list(before)
        for name, value in before.items():
            assert_same_bytes(after[name], value)
        save_file(after, folder / "model.safetensors")
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == before.keys()
        for name, value in before.items():
            assert_same_bytes(saved[name], value)
        size = (folder / "model.safetensors").stat().st_size
        assert size < 1.01 * sum(value.nbytes for value in before.values())

    def check_a_denoiser_that_is_dropped_is_freed(self) -> None:
        model = self.build()
        inputs = self.inputs(model)
        with self.fastpath() as new:
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)
            storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
            blocks = [weakref.ref(block) for name in self.blocks for block in blocks_of(model, name)]
            del model
            gc.collect()
            assert not any(block() for block in blocks)
            assert all(storage.expired() for storage in storages)

    def check_two_denoisers_in_turns_share_one_plan(self, *models: nn.Module) -> None:
        inputs = self.inputs(models[0])
        stock = [infer(model, inputs) for model in models]
        assert not torch.equal(*stock)
        with self.fastpath() as new:
            for _ in range(6):
                for model, expected in zip(models, stock, strict=True):
                    assert_same_bytes(infer(model, inputs), expected)
            assert launches[AHEAD] == self.norms_ahead(models[0])
            assert self.hits(new) == self.served(models[0], 2 * 6)
            assert not failed(new)

    def norms_ahead(self, model: nn.Module) -> int:
        """How many norms a pass computes ahead once it is known which block follows."""
        return sum(len(blocks_of(model, name)) - 1 for name in self.blocks)

    def check_a_block_of_another_kind_is_stocks(self, path: str, change: Callable[[Any], None], reason: str) -> None:
        model = self.build()
        change(model.get_submodule(path))
        kind = path.partition(".")[0]
        with self.fastpath() as new:
            assert_like_stock(model, self.inputs(model), passes=2)
            assert self.hits(new) == self.served(model, 2, stock={kind: 1}), "the other blocks are fused"
            ((why, count),) = self.fallbacks(new, self.blocks[kind]).items()
        assert reason in why
        assert count == 2

    def check_gradients_are_stocks(self, model: nn.Module) -> None:
        inputs = self.inputs(model)
        stock = infer(model, inputs)
        with self.fastpath() as new:
            for _ in range(2):
                assert_same_bytes(call(model, inputs).detach(), stock)
            assert not any(self.hits(new).values())
            counted = {id: dict(new.records[id].fallbacks) for id in self.features}
            assert counted == {id: {"gradients are enabled": n} for id, n in self.served(model, 2).items()}
            with torch.no_grad():
                for _ in range(3):
                    assert_same_bytes(call(model, inputs), stock)
            assert self.hits(new) == self.served(model, 3)

    def check_autocast_is_stocks(self, model: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), self.fastpath() as new:
            assert_like_stock(model, self.inputs(model), passes=2)
            assert not any(self.hits(new).values())
            for id, count in self.served(model, 2).items():
                ((why, counted),) = new.records[id].fallbacks.items()
                assert "autocast" in why
                assert counted == count

    def check_a_kernel_that_fails_after_writing_is_banned(
        self, model: nn.Module, name: str, *, warm: bool, unused: bool = False
    ) -> None:
        """`unused`: it is not launched at all once it is warm."""
        inputs = self.inputs(model)
        with self.fastpath() as new:
            if warm:
                assert_like_stock(model, inputs)
                assert not failed(new)
            with self.failing(name, RuntimeError("CUDA error: scribbled")) as calls:
                assert_like_stock(model, inputs, passes=4)  # in the last one with a norm computed ahead
                settled = calls[name]
                assert_like_stock(model, inputs, passes=1)
                assert calls[name] == settled, "what failed is not tried again"
            assert settled or (unused and warm)
            assert bool(failed(new)) is bool(settled)
            assert all("scribbled" in verdict["reason"] for verdict in failed(new))
            assert_like_stock(model, inputs, passes=2)

    def check_out_of_memory_in_a_kernel_bans_nothing(self, model: nn.Module, name: str, *, warm: bool) -> None:
        inputs = self.inputs(model)
        with self.fastpath() as new:
            if warm:
                assert_like_stock(model, inputs)
            with self.failing(name, torch.OutOfMemoryError("scribbled")) as calls:
                assert_like_stock(model, inputs, passes=2)
            assert calls[name]
            assert not failed(new)
            assert_like_stock(model, inputs)
            assert self.new_hits(new, model, inputs) == self.per_pass(model)

    def check_out_of_memory_while_merging_leaves_the_linears_apart(
        self, monkeypatch: pytest.MonkeyPatch, on: tuple[str, str], *, fails: int
    ) -> None:
        """`on`: scale_prepack, and a feature of the same blocks. `fails`: which allocation of merged weights does."""
        model = self.build()
        inputs = self.inputs(model)
        allocate, taken = torch.empty, 0

        def empty(*size: Any, **options: Any) -> Tensor:
            nonlocal taken
            if options.get("dtype") is torch.float8_e4m3fn:
                taken += 1
                if taken == fails:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            result: Tensor = allocate(*size, **options)
            return result

        with self.fastpath(on) as new:
            monkeypatch.setattr(torch, "empty", empty)
            stock = stock_output(model, inputs)
            for _ in range(3):
                assert_same_bytes(infer(model, inputs), stock)
            assert taken >= fails
            assert new.records[on[1]].hits == 3 * self.per_pass(model)[on[1]]
            assert 0 < new.records["scale_prepack"].hits <= 3 * self.per_pass(model)["scale_prepack"]

    def check_a_guard_that_checks_again(self, model: nn.Module, guard: str) -> None:
        blocks = sum(len(blocks_of(model, name)) for name in self.blocks)
        with self.fastpath(guard=guard) as new:
            assert_like_stock(model, self.inputs(model), passes=8)
            assert self.hits(new) == self.served(model, 8)
            assert not any(new.records[id].fallbacks for id in self.features)
            assert not failed(new)
            assert new.guard.counters["checks"] >= (8 * blocks if guard == "always" else 8)

    def check_a_guard_that_is_off(self, model: nn.Module) -> None:
        with self.fastpath(guard="off") as new:
            assert_like_stock(model, self.inputs(model), passes=4)
            assert self.hits(new) == self.served(model, 4)
            assert new.guard.counters["checks"] == 0
            assert launches[AHEAD]

    def check_the_sites_are_restored_and_a_plan_keeps_what_it_learned(self, model: nn.Module) -> None:
        types: list[Any] = [type(blocks_of(model, name)[0]) for name in self.blocks]
        originals = [vars(kind)["forward"] for kind in types]
        inputs = self.inputs(model)
        stock = infer(model, inputs)
        new = self.make_plan()
        with applied(new):
            for kind, original in zip(types, originals, strict=True):
                replacement = vars(kind)["forward"]
                assert replacement is not original
                assert replacement.__wrapped__ is original, "one wrapper for all features"
        assert [vars(kind)["forward"] for kind in types] == originals
        with applied(new):
            passes = assert_like_stock(model, inputs)
        checks = new.guard.counters["checks"]
        assert_same_bytes(infer(model, inputs), stock)
        assert not launches
        with applied(new):
            assert_same_bytes(infer(model, inputs), stock)
            assert launches[AHEAD] == self.norms_ahead(model)
            assert self.hits(new) == self.served(model, passes + 1)
        assert new.guard.counters["checks"] == checks
        assert [vars(kind)["forward"] for kind in types] == originals

    def check_another_plan_starts_anew(self, model: nn.Module, on: tuple[str, ...]) -> None:
        inputs = self.inputs(model)
        with self.fastpath() as first:
            assert_like_stock(model, inputs, passes=2)
        with self.fastpath(on) as second:
            assert_like_stock(model, inputs, passes=2)
            assert self.hits(second) == self.served(model, 2, on=on)
            assert second.guard.counters["checks"]
        assert self.hits(first) == self.served(model, 2)

    def check_each_feature_announces_its_first_hit(self, model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="sglang_fastpath"), self.fastpath():
            assert_like_stock(model, self.inputs(model), passes=2)
        announced = Counter(record.getMessage() for record in caplog.records if "first hit of" in record.getMessage())
        assert sorted(message.split("first hit of ")[1].split()[0] for message in announced) == sorted(self.features)
        assert set(announced.values()) == {1}

    def check_a_site_that_is_taken_before_makes_all_features_drifted(
        self, model: nn.Module, blocks: str, on: Sequence[str] | None
    ) -> None:
        inputs = self.inputs(model)
        on = self.features if on is None else on
        block_type = type(blocks_of(model, blocks)[0])
        with class_forward(model, blocks, twice_all) as forward:
            theirs = infer(model, inputs)
            with self.fastpath(on) as new:
                assert {id: new.observed(new.records[id])[0] for id in self.features} == {
                    id: State.DRIFTED if id in on else State.OFF for id in self.features
                }
                assert all(f"{block_type.__name__}.forward" in new.observed(new.records[id])[1] for id in on)
                assert_same_bytes(infer(model, inputs), theirs)
                assert vars(block_type)["forward"] is forward
            with pytest.raises(SystemExit, match="drifted"):
                plugin.apply(self.make_plan(on, strict=True))


def twice_all(output: Any) -> Any:
    """Every stream that a block returned, doubled."""
    return tuple(2 * stream for stream in output) if isinstance(output, tuple) else 2 * output


def _twice(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return doubled(kind.forward(module, *args, **kwargs))

    return forward
