"""Which runs of the engine an ablation is made of; tests/test_engine.py makes one."""

from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_fastpath import ablation, cli, envs
from sglang_fastpath.features import BY_ID, CATALOGUE
from sglang_fastpath.status import ProcessStatus


def worker(**states: str) -> ProcessStatus:
    """A worker of the run with everything on; features that are not named were active."""
    features: dict[str, Any] = {feature.id: {"state": states.get(feature.id, "active")} for feature in CATALOGUE}
    return ProcessStatus("ended", {"features": features})


def ablated(*workers: ProcessStatus) -> list[str]:
    """The features that are switched off alone, each of which must be on alone as well, if there are several."""
    variants = list(ablation.with_features(list(workers)))
    assert all(variant.plugin for variant in variants)
    off = [variant for variant in variants if variant.name.startswith("without ")]
    alone = [variant for variant in variants if variant.name.startswith("only ")]
    ids = [variant.name.removeprefix("without ") for variant in off]
    assert [variant.switches for variant in off] == [{BY_ID[id].env: "0"} for id in ids]
    expected = ids if len(ids) > 1 else []
    assert [(v.name, v.switches) for v in alone] == [(f"only {id}", {envs.ONLY: id}) for id in expected]
    assert len(variants) == len(off) + len(alone)
    return ids


EVERY = [feature.id for feature in CATALOGUE]


def test_without_a_worker_to_ask_every_feature_is_ablated() -> None:
    assert ablated() == EVERY


@pytest.mark.parametrize("state", ["off", "unsupported"])
def test_what_no_worker_could_use_is_left_out(state: str) -> None:
    """Each run starts an engine: what is not for the model or the machine would show nothing."""
    out = {"bias_fold": state, "step_graph": state}
    assert ablated(worker(**out)) == [id for id in EVERY if id not in out]
    assert ablated(worker(**out), worker(**out)) == [id for id in EVERY if id not in out]


@pytest.mark.parametrize("state", ["active", "never hit", "parity-failed", "native", "drifted"])
def test_what_could_have_run_is_ablated(state: str) -> None:
    assert "act_quant" in ablated(worker(act_quant=state))
    assert "act_quant" in ablated(worker(act_quant="unsupported"), worker(act_quant=state)), "in another worker"


def test_of_the_features_that_could_run_those_that_are_wanted_are_ablated() -> None:
    workers = [worker(step_graph="off")]
    wanted = ["norm_quant", "step_graph", "cfg_mod_cache"]
    names = [variant.name for variant in ablation.with_features(workers, wanted)]
    assert names == ["without cfg_mod_cache", "without norm_quant", "only cfg_mod_cache", "only norm_quant"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model-path", "x", "--features", "norm_quant,norm"], "--features: no 'norm'; known: cfg_mod_cache, "),
        (["--model", "flux2", "--features", "norm_quant"], "--features is for --model-path"),
    ],
)
def test_features_that_cannot_be_chosen_are_an_error(options: list[str], says: str) -> None:
    result = CliRunner().invoke(cli.app, ["ablate", *options])
    assert result.exit_code == 1
    assert says in result.output + str(result.exception)


def test_a_single_feature_is_not_run_alone_again() -> None:
    assert ablated(worker(**{id: "off" for id in EVERY if id != "act_quant"})) == ["act_quant"]
