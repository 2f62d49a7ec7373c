"""`register()`: idempotent, strict when asked to be, and undone without a trace."""

import argparse
import dataclasses
import functools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformerBlock

from sglang_fastpath import contracts, envs, plan, plugin, workers
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.hooks import Patch
from sglang_fastpath.plan import State

SHARING = [
    feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.qwen_image_block")
]


def test_not_asked_for_means_no_plan_and_no_patch() -> None:
    plugin.register()
    assert plan.current() is None
    assert not plugin._patches


def test_asked_for_twice_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ENABLE, "1")
    monkeypatch.setenv(envs.EMULATE, "1")
    plugin.register()
    first = plan.current()
    patches = dict(plugin._patches)
    plugin.register()
    assert plan.current() is first
    assert plugin._patches == patches
    on = [feature for feature in CATALOGUE if feature.measured and not feature.needs_a_gpu]
    modules = {port.patch for feature in on for port in feature.ports}
    assert modules < patches.keys()
    plugin.deactivate()
    assert plan.current() is None


def apply(*, off: Iterable[str] = (), strict: bool = False) -> plan.Plan:
    """Applies the whole catalogue but for `off`, as on a machine that has what its features need."""
    settings = envs.Settings(enabled=True, emulate=True, strict=strict, switches=dict.fromkeys(off, False))
    plugin.apply(new := plan.make_plan(settings, contracts.installed_release()))
    return new


def test_features_of_one_patch_module_replace_their_shared_site_once() -> None:
    stock = QwenImageTransformerBlock.forward
    assert len(SHARING) == 5
    for off in ([], SHARING[:1], SHARING[1:]):
        apply(off=off)
        assert QwenImageTransformerBlock.forward.__wrapped__ is stock, "not one wrapper around another"
        plugin.deactivate()
        assert QwenImageTransformerBlock.forward is stock
    apply(off=SHARING)
    assert QwenImageTransformerBlock.forward is stock


@pytest.fixture
def foreign_forward() -> Iterator[Callable[[], Callable[..., None]]]:
    """Puts another plugin's function in the place of the block's forward, whatever is there by then."""
    stock = QwenImageTransformerBlock.forward

    def replace() -> Callable[..., None]:
        def foreign(self, **kwargs) -> None: ...

        QwenImageTransformerBlock.forward = foreign
        return foreign

    yield replace
    QwenImageTransformerBlock.forward = stock


@pytest.mark.parametrize("strict", [False, True])
def test_a_lost_site_is_lost_to_every_feature_of_its_patch_module_and_to_no_other(
    strict: bool, foreign_forward: Callable[[], Callable[..., None]]
) -> None:
    new = apply(off=SHARING[:1], strict=strict)
    foreign = foreign_forward()
    if strict:
        with pytest.raises(
            SystemExit,
            match=", ".join(
                rf"{id}( in Qwen-Image)? \(\S+ replaced by \S+foreign\)" for id in (SHARING[-1], *SHARING[1:-1])
            ),
        ):
            plugin.verify(new)
    else:
        plugin.verify(new)
    elsewhere = {id for id in new.records if id not in SHARING}
    assert {id for id in SHARING if new.observed(new.records[id])[0] is State.DRIFTED} == set(SHARING[1:])
    assert not any(new.records[id].out for id in elsewhere)
    assert {id for id in SHARING if new.records[id].state is State.DRIFTED} == {"bias_fold"}, "the others have FLUX.2"
    assert QwenImageTransformerBlock.forward is foreign


def test_a_misspelt_variable_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FASTPATH_GARD", "off")
    with pytest.raises(SystemExit, match="SGLANG_FASTPATH_GUARD"):
        plugin.register()


def test_strict_refuses_to_start_with_something_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    release = contracts.installed_release()
    assert release is not None
    newer = dataclasses.replace(release, version="0.5.99")
    monkeypatch.setattr(contracts, "installed_release", lambda: newer)
    monkeypatch.setenv(envs.ENABLE, "1")
    plugin.register()
    assert plan.current() is not None, "without strict, stock serves"
    plugin.deactivate()
    monkeypatch.setenv(envs.STRICT, "1")
    with pytest.raises(SystemExit, match=r"drifted: cfg_mod_cache .*0\.5\.99 is not recorded"):
        plugin.register()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_strict_refuses_to_start_without_what_a_feature_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (envs.ENABLE, envs.STRICT):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit, match=r"unsupported: .*norm_quant \(no NVIDIA GPU"):
        plugin.register()


def test_strict_does_not_mind_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (envs.ENABLE, envs.STRICT):
        monkeypatch.setenv(name, "1")
    for feature in CATALOGUE:
        monkeypatch.setenv(feature.env, "0")
    plugin.register()
    assert plan.current() is not None


def parse(target: str, *arguments: str) -> argparse.Namespace:
    """Parses with one of SGLang's own parsers, with the flag added as `register` adds it."""
    flag = Patch()
    flag.replace(target, functools.partial(plugin._with_plugin_flag, plugin._PARSERS[target]), stock_only=False)
    module, _, qualname = target.partition(":")
    try:
        owner = getattr(__import__(module, fromlist=["x"]), qualname.split(".")[0])
        parser = argparse.ArgumentParser()
        owner.add_cli_args(parser)
        return parser.parse_args(["--model-path", "x", *arguments])
    finally:
        flag.revert()


@pytest.mark.parametrize("target", plugin._PARSERS)
def test_both_of_sglangs_parsers_take_the_flag(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ENABLE, "0")
    assert parse(target).plugin is None
    assert os.environ[envs.ENABLE] == "0"
    assert parse(target, "--plugin", "fastpath").plugin == "fastpath"
    assert os.environ[envs.ENABLE] == "1", "workers inherit the environment, not the command line"
    planned = plan.current()
    assert planned is not None
    path = plugin._PARSERS[target]
    assert list(planned.records) == [feature.id for feature in CATALOGUE if feature.path in (path, "both")]


@pytest.mark.parametrize("target", plugin._PARSERS)
def test_an_unknown_plugin_is_an_error_that_names_the_known_ones(target: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(target, "--plugin", "unknown")
    assert "known: fastpath" in capsys.readouterr().err


def test_the_process_target_survives_pickling_under_its_own_name() -> None:
    """What `functools.wraps` would lose: the child must find our function, not the original."""
    from sglang.multimodal_gen.runtime.managers.gpu_worker import run_scheduler_process

    target = pickle.loads(pickle.dumps(workers.with_plugin(run_scheduler_process)))
    assert target.func is workers.run_worker
    assert target.args == ("sglang.multimodal_gen.runtime.managers.gpu_worker:run_scheduler_process",)
