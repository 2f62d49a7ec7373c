"""`register()`: idempotent, strict when asked to be, and undone without a trace."""

import argparse
import dataclasses
import functools
import os
import pickle

import pytest

from sglang_fastpath import contracts, envs, plan, plugin, workers
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.hooks import Patch


def test_not_asked_for_means_no_plan_and_no_patch() -> None:
    plugin.register()
    assert plan.current() is None
    assert not plugin._patches


def test_asked_for_twice_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ENABLE, "1")
    plugin.register()
    first = plan.current()
    patches = dict(plugin._patches)
    plugin.register()
    assert plan.current() is first
    assert plugin._patches == patches
    assert "cfg_mod_cache" in patches
    plugin.deactivate()
    assert plan.current() is None


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
    assert list(planned.records) == [feature.id for feature in CATALOGUE if feature.path == path]


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
