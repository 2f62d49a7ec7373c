"""`register()`, which SGLang calls through its entry points, and the `--plugin` flag.

Called in a process that was not asked for the plugin, `register()` patches nothing. The flag is only added to
SGLang's parsers when the command line uses it (or asks for help); parsing it sets SGLANG_FASTPATH=1, which
workers inherit.
"""

import argparse
import functools
import importlib
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from sglang_fastpath import __version__, contracts, envs, plan, server_route, workers
from sglang_fastpath.features import CATALOGUE, llm_family
from sglang_fastpath.hooks import Patch
from sglang_fastpath.plan import FeatureRecord, Plan, State
from sglang_fastpath.status import StatusWriter
from sglang_fastpath.worker_watch import CLIENT, WorkerWatch

logger = logging.getLogger("sglang_fastpath")

NAMES = ("fastpath",)
# SGLang's parsers, and which features what they start can use.
_PARSERS = {
    "sglang.srt.server_args:ServerArgs.add_cli_args": "llm",
    "sglang.multimodal_gen.runtime.server_args:ServerArgs.add_cli_args": "diffusion",
}
_LAUNCHER = "sglang.multimodal_gen.runtime.launch_server"
_FP8 = "sglang.multimodal_gen.runtime.layers.quantization.fp8"
_LLM_EMULATED = ("sglang.srt.layers.quantization.fp8", "sglang.srt.layers.rotary_embedding.base")
_EVENT_LOOP = "sglang.multimodal_gen.runtime.managers.scheduler:Scheduler.event_loop"
_LOADS_IN_WORKERS = Version("0.5.21")  # from here on SGLang loads plugins in its diffusion workers itself
_LLM_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_WORKER_NAME = re.compile(r"sglang-diffusionWorker-(\d+)")  # SGLang's name of the process
_SCHEDULER_TITLE = re.compile(r"sglang::scheduler_?(.*)")  # what SGLang writes where `ps` shows it

_patches: dict[str, Patch] = {}
_status: StatusWriter | None = None


def register(*, in_worker: bool = False) -> None:
    """Puts the plugin into this process, if it was asked for. Safe to call any number of times.

    Raises:
        SystemExit: with a message on stderr, if a setting is wrong, or under SGLANG_FASTPATH_STRICT=1 if a
            feature cannot run. (SGLang swallows ordinary exceptions of plugins.)
    """
    if _asked_on_command_line() and "flag" not in _patches:
        _patches["flag"] = flag = Patch()
        for target, path in _PARSERS.items():
            flag.replace(target, functools.partial(_with_plugin_flag, path), stock_only=False)
    if any(name.startswith(envs.PREFIX) for name in os.environ):
        activate(in_worker=in_worker)


def activate(*, in_worker: bool = False, path: str | None = None) -> None:
    """Reads the settings, makes the plan and applies it; see `register` for the errors.

    `path` is "llm" or "diffusion" where it is known what this process serves: features of the other are left out.
    """
    try:
        settings = envs.read()
    except envs.ConfigurationError as error:
        sys.exit(f"sglang-fastpath: {error}")
    if not settings.enabled and not settings.emulate:
        return
    _log_to_stderr()
    release = contracts.installed_release()
    if not in_worker and "workers" not in _patches and release and _needs_help_in_workers(release):
        _patches["workers"] = seam = Patch(on_lost=_warn_about_workers)
        seam.replace(f"{_LAUNCHER}:run_scheduler_process", workers.with_plugin, stock_only=False)
        seam.replace(f"{_LAUNCHER}:_run_disagg_role_process", workers.with_plugin, stock_only=False)
    if settings.emulate and "emulation" not in _patches:
        _patches["emulation"] = emulation = Patch()
        emulation.call_when_imported(_FP8, _emulate_fp8)
        for module in _LLM_EMULATED:
            emulation.call_when_imported(module, functools.partial(_emulate_llm, module))
    if settings.enabled and not in_worker and "watch" not in _patches:
        watch, alive = Patch(), WorkerWatch()
        _patches["watch"] = watch
        watch.replace(f"{CLIENT}.initialize", alive.wrap_initialize, stock_only=False)
        watch.replace(f"{CLIENT}.forward", alive.wrap_forward, stock_only=False)
    if settings.enabled and not in_worker and "route" not in _patches:
        _patches["route"] = route = Patch(on_lost=_warn_about_route)
        route.call_when_imported(server_route.LLM_SERVER, server_route.add_to_llm_server)
        route.replace(server_route.CREATE_APP, server_route.wrap_create_app, stock_only=False)
    if settings.enabled and plan.current() is None:
        catalogue = [feature for feature in CATALOGUE if feature.serves(path)]
        apply(new := plan.make_plan(settings, release, catalogue=catalogue))
        _report(new)


def deactivate() -> None:
    """Restores every original object of SGLang and forgets the plan."""
    global _status
    for name in reversed(list(_patches)):
        _patches.pop(name).revert()
    plan.install(None)
    _status = None
    logger.handlers.clear()
    logger.propagate = True


def _needs_help_in_workers(release: contracts.Release) -> bool:
    # A version that is not recorded may be no version at all, and no feature is active there.
    return contracts.is_recorded(release) and Version(release.version) < _LOADS_IN_WORKERS


def _asked_on_command_line() -> bool:
    words = {word.partition("=")[0] for word in sys.argv[1:]}
    return not words.isdisjoint({"--plugin", "--help", "-h"})


class _PluginAction(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values not in NAMES:
            parser.error(f"--plugin {values}: no such plugin; known: {', '.join(NAMES)}")
        setattr(namespace, self.dest, values)
        os.environ[envs.ENABLE] = "1"
        activate(path=self.const)


def _with_plugin_flag(path: str, add_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_cli_args)
    def add_cli_args_and_plugin(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = add_cli_args(parser, *args, **kwargs)
        parser.add_argument(
            "--plugin",
            action=_PluginAction,
            const=path,
            metavar="NAME",
            help="Load a plugin; 'fastpath' swaps in fused, bit-identical kernels (sglang-fastpath features).",
        )
        return result

    return add_cli_args_and_plugin


def apply(new: Plan) -> None:
    """Makes `new` the plan of this process and applies its active features; `deactivate` undoes it.

    Raises:
        SystemExit: under SGLANG_FASTPATH_STRICT=1, if a feature cannot run.
    """
    plan.install(new)
    modules: dict[str, dict[str, FeatureRecord]] = {}
    for record in new.active():
        for port in record.ports:
            modules.setdefault(port.patch, {})[record.feature.id] = record
    for module, records in modules.items():
        _apply_module(new, module, records)
    if new.settings.strict:
        _refuse_what_cannot_run(new)


def _report(new: Plan) -> None:
    """Lets this process say what it runs: in its status file, and in one line once its model is loaded."""
    global _status
    _status = StatusWriter(new.settings.status_dir, _role())
    new.on_progress = lambda: _status.write_soon(new) if _status else None
    new.on_event = lambda: _status.write(new) if _status else None
    _patches["ready"] = ready = Patch()
    ready.replace(_EVENT_LOOP, _announcing_readiness, stock_only=False)
    ready.replace(f"{_LLM_SCHEDULER}.run_event_loop", _announcing_llm, stock_only=False)
    # 0.5.11 inherits `on_idle`; no feature of the LLM path, whose counts this is about, is active there.
    _patches["counts"] = counts = Patch()
    counts.replace(f"{_LLM_SCHEDULER}.run_batch", _reporting_counts, stock_only=False)
    counts.replace(f"{_LLM_SCHEDULER}.on_idle", _catching_up, stock_only=False)
    # Processes that others start speak when they have loaded a model, or never: then there is nothing to say.
    if _is_main():
        _announce(new)


def _apply_module(new: Plan, module: str, records: dict[str, FeatureRecord]) -> None:
    """Applies one patch module for all its active features at once: they share its sites, and lose them together."""

    def lost(why: str) -> None:
        models: dict[str, None] = {}
        for record in records.values():
            if port := record.feature.port_of(module):
                record.take_out(port, State.DRIFTED, why)
                models |= dict.fromkeys(port.models)
        logger.warning("%s is not applied to %s: %s; stock serves", ", ".join(records), ", ".join(models), why)
        if new.settings.strict:
            _refuse_what_cannot_run(new)

    def first_hit(record: FeatureRecord) -> None:
        logger.info("sglang-fastpath: first hit of %s (%s)", record.feature.id, _role())
        new.on_event()

    for record in records.values():
        record.on_first_hit = first_hit
    patch = _patches[module] = Patch(on_lost=lost)
    stock = {site for record in records.values() for site in record.feature.sites}
    for site, wrap in importlib.import_module(module).wraps(records, new).items():
        # Some replace functions of this plugin as well, which no contract knows.
        patch.replace(site, wrap, stock_only=site in stock)


def _refuse_what_cannot_run(new: Plan) -> None:
    broken = {State.UNSUPPORTED, State.DRIFTED}
    states = {record.state for record in new.records.values()}
    states |= {state for record in new.records.values() for state, _ in record.out.values()}
    if states & broken:
        sys.exit(f"sglang-fastpath: {envs.STRICT}=1 and not everything can run: {new.summary(_role())}")


def _announce(new: Plan) -> None:
    if _status:
        _status.role = _role()
        _status.write(new)
    logger.info("sglang-fastpath %s: %s", __version__, new.summary(_role()))


def _role() -> str:
    """What this process is, in words: `main`, `diffusion worker 0`, `scheduler TP0`, or the process's own name."""
    name = multiprocessing.current_process().name
    worker = _WORKER_NAME.fullmatch(name)
    if worker:
        return f"diffusion worker {worker[1]}"
    titles = sys.modules.get("setproctitle")
    if titles and (scheduler := _SCHEDULER_TITLE.fullmatch(titles.getproctitle())):
        return f"scheduler {scheduler[1].replace('_', ' ')}".strip()
    return "main" if _is_main() else name


def _is_main() -> bool:
    """Whether nobody spawned this process. By its name: its parent is not known yet while it imports SGLang."""
    return multiprocessing.current_process().name == "MainProcess"


def _announcing_readiness(event_loop: Callable[..., Any]) -> Callable[..., Any]:
    """A diffusion worker's model is loaded when its event loop starts: now the status line can be true."""

    @functools.wraps(event_loop)
    def announced_event_loop(scheduler: Any) -> Any:
        new = plan.current()
        if new is None:
            return event_loop(scheduler)
        verify(new)
        _remark_on_fallback(scheduler, new)
        if _status:
            _status.serves = True
        _announce(new)
        return event_loop(scheduler)

    return announced_event_loop


def _announcing_llm(run_event_loop: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a scheduler of the language model server, one for each rank."""

    @functools.wraps(run_event_loop)
    def announced_event_loop(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if new := plan.current():
            new.narrow("llm")
            verify(new)
            runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
            if (model := getattr(runner, "model", None)) is not None:
                new.loaded(llm_family(type(model).__name__))
            if _status:
                _status.serves = True
            _announce(new)
        return run_event_loop(scheduler, *args, **kwargs)

    return announced_event_loop


def _reporting_counts(run_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_batch)
    def reported_run_batch(*args: Any, **kwargs: Any) -> Any:
        result = run_batch(*args, **kwargs)
        if new := plan.current():
            new.on_progress()
        return result

    return reported_run_batch


def _catching_up(on_idle: Callable[..., Any]) -> Callable[..., Any]:
    """Writes what the last batch counted: nothing else would, until the next one."""

    @functools.wraps(on_idle)
    def on_idle_and_catch_up(*args: Any, **kwargs: Any) -> Any:
        if _status and (new := plan.current()):
            _status.catch_up(new)
        return on_idle(*args, **kwargs)

    return on_idle_and_catch_up


def verify(new: Plan) -> None:
    """Looks up every replaced target again; what does not reach our code any more becomes `drifted`."""
    for module in {port.patch for record in new.active() for port in record.ports}:
        if patch := _patches.get(module):
            patch.verify()


def _remark_on_fallback(scheduler: Any, new: Plan) -> None:
    """Says so when SGLang fell back to the diffusers backend, where none of its modules run."""
    pipeline = getattr(getattr(scheduler, "worker", None), "pipeline", None)
    if _status is None or type(pipeline).__name__ != "DiffusersPipeline":
        return
    _status.remark = (
        "nothing is accelerated: SGLang fell back to the diffusers backend, because it does not know the model "
        "by its path. Name the folder after the model (it must contain e.g. 'qwen-image') or pass --model-id."
    )
    logger.warning("sglang-fastpath: %s", _status.remark)
    for record in new.active():
        record.state, record.reason = State.UNSUPPORTED, "SGLang fell back to the diffusers backend"


def _emulate_fp8() -> Callable[[], None]:
    """Replaces the FP8 linear's arithmetic by torch beneath SGLang's own modules; returns how to undo it."""
    from sglang_fastpath.patches.diffusion import fp8_cpu_emulation

    _warn_about_emulation()
    revert: Callable[[], None] = fp8_cpu_emulation.apply()
    return revert


def _emulate_llm(module: str) -> Callable[[], None]:
    """The same for what a language model needs of one of SGLang's modules."""
    from sglang_fastpath.patches.llm import cpu_emulation

    if module == cpu_emulation.FP8:
        _warn_about_emulation()
    revert: Callable[[], None] = cpu_emulation.apply(module)
    return revert


def _warn_about_emulation() -> None:
    logger.warning(
        "sglang-fastpath: %s=1: the FP8 linear is emulated in torch (%s); times mean nothing",
        envs.EMULATE,
        _role(),
    )


def _warn_about_workers(why: str) -> None:
    logger.warning("sglang-fastpath cannot get into the diffusion workers (%s); stock serves", why)


def _warn_about_route(why: str) -> None:
    logger.warning("%s is not added to the server (%s); use `sglang-fastpath status`", server_route.PATH, why)


def _log_to_stderr() -> None:
    """Our lines are logged before SGLang configures logging and must survive it: they get their own handler."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
