"""Settings: every variable is read, and none can be misspelt without an error that names the right one."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fastpath import envs
from sglang_fastpath.features import CATALOGUE


def test_nothing_set_means_off() -> None:
    settings = envs.read({})
    assert not settings.enabled
    assert settings.guard == "once"
    assert settings.parity == "bitwise"
    assert all(settings.off_because(feature.id) is None for feature in CATALOGUE if feature.measured)


@pytest.mark.parametrize("feature", CATALOGUE, ids=lambda feature: feature.id)
def test_each_feature_has_its_own_switch(feature) -> None:
    settings = envs.read({"SGLANG_FASTPATH": "1", feature.env: "0"})
    assert settings.off_because(feature.id) == f"{feature.env}=0"
    others = [other for other in CATALOGUE if other is not feature]
    assert all(settings.off_because(other.id) == other.default_off for other in others)
    assert envs.read({feature.env: "1"}).off_because(feature.id) is None


def test_what_has_not_been_measured_is_off_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    feature = dataclasses.replace(CATALOGUE[0], id="unmeasured", measured=False)
    monkeypatch.setitem(envs.BY_ID, "unmeasured", feature)
    reason = "not measured on a GPU yet; SGLANG_FASTPATH_UNMEASURED=1 switches it on"
    assert envs.Settings().off_because("unmeasured") == reason
    assert envs.Settings(switches={"unmeasured": True}).off_because("unmeasured") is None
    assert envs.Settings(switches={"unmeasured": False}).off_because("unmeasured") == "SGLANG_FASTPATH_UNMEASURED=0"
    assert envs.Settings(only=frozenset({"unmeasured"})).off_because("unmeasured") is None
    assert envs.Settings(only=frozenset({"another"})).off_because("unmeasured") == f"not in {envs.ONLY}"


def test_the_table_of_variables_tells_what_is_off_by_default() -> None:
    defaults = {variable.name: variable.default for variable in envs.VARIABLES}
    assert {feature.id: defaults[feature.env] for feature in CATALOGUE} == {
        feature.id: "1" if feature.measured else "0" for feature in CATALOGUE
    }


def test_a_features_own_switch_is_stronger_than_only() -> None:
    feature = CATALOGUE[0]
    assert envs.read({envs.ONLY: feature.id}).off_because(feature.id) is None
    assert envs.read({envs.ONLY: feature.id, feature.env: "0"}).off_because(feature.id) == f"{feature.env}=0"
    settings = envs.Settings(only=frozenset({"another"}), switches={feature.id: True})
    assert settings.off_because(feature.id) is None
    assert envs.Settings(only=frozenset({"another"})).off_because(feature.id) == f"not in {envs.ONLY}"


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
@given(data=st.data())
def test_a_misspelt_name_is_an_error_that_names_the_right_one(variable, data) -> None:
    position = data.draw(st.integers(len(envs.PREFIX), len(variable.name)))
    misspelt = variable.name[:position] + "Q" + variable.name[position:]
    with pytest.raises(envs.ConfigurationError, match=variable.name) as caught:
        envs.read({misspelt: "1"})
    assert misspelt in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (envs.ENABLE, "yes"),
        (envs.STRICT, "2"),
        (envs.PARITY, "exact"),
        (envs.GUARD, "sometimes"),
        (envs.GUARD, "sample:0"),
        (CATALOGUE[0].env, "on"),
        (CATALOGUE[0].env, "all"),
        ("SGLANG_FASTPATH_GEMM_TUNER", "everywhere"),
        (envs.GRAPHS, "0"),
        (envs.GRAPHS, "-1"),
        (envs.GRAPHS, "many"),
        (envs.GRAPHS, "2.5"),
        (envs.GRAPHS, "\u0663"),  # a digit to Python
        (envs.GRAPH_BYTES, "-1"),
        (envs.GRAPH_BYTES, "8G"),
        (envs.GRAPH_BYTES, "1e9"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(envs.ConfigurationError) as caught:
        envs.read({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_only_with_an_unknown_feature_names_the_nearest() -> None:
    with pytest.raises(envs.ConfigurationError, match="cfg_mod_cache"):
        envs.read({envs.ONLY: "cfg_mod_cash"})


def test_the_status_folder_is_the_users_own() -> None:
    assert envs.read({"XDG_STATE_HOME": "/x"}).status_dir == Path("/x/sglang-fastpath/status")
    assert envs.read({}).status_dir == Path.home() / ".local/state/sglang-fastpath/status"
    assert envs.read({envs.STATUS_DIR: "/y"}).status_dir == Path("/y")


def test_the_tuners_cache_lies_in_the_users_cache_folder() -> None:
    assert envs.read({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/sglang-fastpath")
    assert envs.read({}).cache_dir == Path.home() / ".cache/sglang-fastpath"


@pytest.mark.parametrize(("value", "on", "every"), [("0", False, False), ("1", True, False), ("all", True, True)])
def test_the_tuner_takes_every_backend_if_asked(value: str, on: bool, every: bool) -> None:
    settings = envs.read({"SGLANG_FASTPATH_GEMM_TUNER": value})
    assert (settings.off_because("gemm_tuner") is None, settings.every_gemm_backend) == (on, every)
    assert not envs.read({}).every_gemm_backend


def test_a_feature_that_is_not_bit_exact_needs_the_ulp_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    ulp = dataclasses.replace(CATALOGUE[0], id="inexact", parity="ulp")
    monkeypatch.setitem(envs.BY_ID, "inexact", ulp)
    assert "SGLANG_FASTPATH_PARITY=ulp" in (envs.read({}).off_because("inexact") or "")
    assert envs.read({envs.PARITY: "ulp"}).off_because("inexact") is None


def test_the_graphs_of_step_graph_have_their_limits() -> None:
    assert (envs.read({}).graphs, envs.read({}).graph_bytes) == (8, 8 << 30)
    assert envs.read({}) == envs.read({envs.GRAPHS: "", envs.GRAPH_BYTES: ""})
    settings = envs.read({"SGLANG_FASTPATH_GRAPHS": "1", "SGLANG_FASTPATH_GRAPH_BYTES": "0"})
    assert (settings.graphs, settings.graph_bytes) == (1, 0)
    assert envs.read({envs.GRAPH_BYTES: str(1 << 40)}).graph_bytes == 1 << 40


@pytest.mark.parametrize(("name", "least"), [(envs.GRAPHS, 1), (envs.GRAPH_BYTES, 0)])
def test_a_number_too_small_says_from_where(name: str, least: int) -> None:
    with pytest.raises(envs.ConfigurationError, match=f"{name}='{least - 1}' is not a whole number from {least}"):
        envs.read({name: str(least - 1)})
