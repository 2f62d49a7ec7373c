"""Apply, verify, revert: on SGLang's own objects, beside SGLang's own hook registry."""

import functools
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_fastpath.hooks import Patch

LINEAR = "sglang.multimodal_gen.runtime.layers.linear:ReplicatedLinear.forward"
EXTRA_REPR = "sglang.multimodal_gen.runtime.layers.linear:ReplicatedLinear.extra_repr"


def shouting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def shout(*args: Any, **kwargs: Any) -> Any:
        return str(original(*args, **kwargs)).upper()

    return shout


@pytest.fixture(autouse=True)
def stock_linear() -> Iterator[None]:
    """Whatever a test does to the class, the next one finds stock's; HookRegistry cannot undo by itself."""
    before = {name: vars(ReplicatedLinear)[name] for name in ("forward", "extra_repr")}
    yield
    for name, value in before.items():
        setattr(ReplicatedLinear, name, value)
    HookRegistry.reset()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose `defining` module holds a function and a class that `importing` has copied."""
    name = f"hooked_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "defining.py").write_text(
        "def greet():\n    return 'hello'\n\n"
        "class Parser:\n    @staticmethod\n    def add(x):\n        return x\n"
        "    def method(self):\n        return 'm'\n"
    )
    (folder / "importing.py").write_text("from .defining import greet\n\ndef call():\n    return greet()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("qualname", ["greet", "Parser.add", "Parser.method"])
def test_revert_restores_the_very_object(package: str, qualname: str) -> None:
    module = importlib.import_module(f"{package}.defining")
    importing = importlib.import_module(f"{package}.importing")
    owner = module.Parser if "." in qualname else module
    name = qualname.split(".")[-1]
    before, imported = vars(owner)[name], importing.greet
    patch = Patch()
    patch.replace(f"{package}.defining:{qualname}", shouting, stock_only=False)
    assert vars(owner)[name] is not before
    assert patch.verify() is None
    patch.revert()
    assert vars(owner)[name] is before
    assert importing.greet is imported


def test_importers_of_a_function_are_patched_too(package: str) -> None:
    importing = importlib.import_module(f"{package}.importing")
    patch = Patch()
    patch.replace(f"{package}.defining:greet", shouting, stock_only=False)
    assert importing.call() == "HELLO"
    patch.revert()
    assert importing.call() == "hello"


def test_a_module_imported_later_is_patched_before_anybody_copies_from_it(package: str) -> None:
    patch = Patch()
    patch.replace(f"{package}.defining:greet", shouting, stock_only=False)
    assert importlib.import_module(f"{package}.importing").call() == "HELLO"
    patch.revert()
    assert importlib.import_module(f"{package}.importing").call() == "hello"


def test_a_module_imported_after_revert_stays_stock(package: str) -> None:
    patch = Patch()
    patch.replace(f"{package}.defining:greet", shouting, stock_only=False)
    patch.revert()
    assert importlib.import_module(f"{package}.importing").call() == "hello"


def test_a_copied_name_alone_is_replaced_where_the_target_says(package: str) -> None:
    """The process target lives in one module and is copied into the launcher: only the copy is to change."""
    importing = importlib.import_module(f"{package}.importing")
    defining = importlib.import_module(f"{package}.defining")
    patch = Patch()
    patch.replace(f"{package}.importing:greet", shouting, stock_only=False)
    assert (importing.call(), defining.greet()) == ("HELLO", "hello")


def test_static_methods_stay_static(package: str) -> None:
    module = importlib.import_module(f"{package}.defining")
    patch = Patch()
    patch.replace(f"{package}.defining:Parser.add", shouting, stock_only=False)
    assert module.Parser.add("x") == "X"
    assert module.Parser().add("x") == "X"


def test_one_missing_target_undoes_the_others(package: str) -> None:
    module = importlib.import_module(f"{package}.defining")
    before = module.greet
    lost: list[str] = []
    patch = Patch(on_lost=lost.append)
    patch.replace(f"{package}.defining:greet", shouting, stock_only=False)
    patch.replace(f"{package}.defining:Parser.gone", shouting, stock_only=False)
    assert module.greet is before
    assert len(lost) == 1
    assert "Parser.gone is missing" in lost[0]
    patch.replace(f"{package}.defining:Parser.method", shouting, stock_only=False)
    assert module.Parser().method() == "m", "a lost patch must not be half applied later"


def test_stock_is_replaced_and_verified() -> None:
    before = ReplicatedLinear.extra_repr
    patch = Patch()
    patch.replace(EXTRA_REPR, shouting)
    assert ReplicatedLinear.extra_repr is not before
    assert patch.verify() is None
    patch.revert()
    assert ReplicatedLinear.extra_repr is before


def test_a_target_that_is_not_stock_any_more_is_left_alone() -> None:
    foreign = shouting(ReplicatedLinear.extra_repr)
    ReplicatedLinear.extra_repr = foreign
    lost: list[str] = []
    Patch(on_lost=lost.append).replace(EXTRA_REPR, shouting)
    assert ReplicatedLinear.extra_repr is foreign
    assert len(lost) == 1
    assert EXTRA_REPR in lost[0]


def test_a_plain_assignment_after_ours_is_noticed() -> None:
    forward = ReplicatedLinear.forward
    patch = Patch()
    patch.replace(LINEAR, shouting)
    patch.replace(EXTRA_REPR, shouting)
    foreign = ReplicatedLinear.extra_repr = lambda self: "foreign"
    why = patch.verify()
    assert why is not None
    assert EXTRA_REPR in why
    assert ReplicatedLinear.extra_repr is foreign, "somebody else's object must not be overwritten"
    assert ReplicatedLinear.forward is forward, "the rest of a lost patch must go"


def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return f"<{original(*args, **kwargs)}>"


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> ReplicatedLinear:
    """A real linear without weights: `extra_repr` only reads sizes."""
    made = ReplicatedLinear.__new__(ReplicatedLinear)
    made.__dict__.update(input_size=3, output_size=5, bias=None, tp_size=1, _modules={})
    return made


def test_another_plugins_wrapper_composes_in_either_order(linear: ReplicatedLinear) -> None:
    stock = linear.extra_repr()
    HookRegistry.register(EXTRA_REPR.replace(":", "."), around, HookType.AROUND)
    HookRegistry.apply_hooks()
    patch = Patch()
    patch.replace(EXTRA_REPR, shouting)
    assert patch.verify() is None
    assert linear.extra_repr() == f"<{stock}>".upper()
    patch.revert()
    assert linear.extra_repr() == f"<{stock}>"


def test_a_wrapper_around_somebody_elses_function_is_no_licence(linear: ReplicatedLinear) -> None:
    """Composing is for wrappers around stock: what is beneath them must be stock's own."""
    ReplicatedLinear.extra_repr = lambda self: "foreign"
    HookRegistry.register(EXTRA_REPR.replace(":", "."), around, HookType.AROUND)
    HookRegistry.apply_hooks()
    lost: list[str] = []
    Patch(on_lost=lost.append).replace(EXTRA_REPR, shouting)
    assert linear.extra_repr() == "<foreign>"
    assert len(lost) == 1


def test_a_wrapper_registered_after_ours_composes(linear: ReplicatedLinear) -> None:
    stock = linear.extra_repr()
    patch = Patch()
    patch.replace(EXTRA_REPR, shouting)
    HookRegistry.register(EXTRA_REPR.replace(":", "."), around, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert linear.extra_repr() == f"<{stock.upper()}>"
    assert patch.verify() is None


def test_another_plugins_replacement_wins_in_either_order(linear: ReplicatedLinear) -> None:
    def replacing(self: Any) -> str:
        return "theirs"

    lost: list[str] = []
    patch = Patch(on_lost=lost.append)
    patch.replace(EXTRA_REPR, shouting)
    HookRegistry.register(EXTRA_REPR.replace(":", "."), replacing, HookType.REPLACE)
    HookRegistry.apply_hooks()
    assert linear.extra_repr() == "theirs"
    assert "replacing" in (patch.verify() or "")

    later = Patch(on_lost=lost.append)
    later.replace(EXTRA_REPR, shouting)
    assert linear.extra_repr() == "theirs"
    assert len(lost) == 2


def test_undoing_what_an_import_triggered(package: str) -> None:
    events: list[str] = []

    def apply() -> Callable[[], None]:
        events.append("applied")
        return lambda: events.append("undone")

    patch = Patch()
    patch.call_when_imported(f"{package}.defining", apply)
    assert events == []
    importlib.import_module(f"{package}.defining")
    assert events == ["applied"]
    patch.revert()
    assert events == ["applied", "undone"]


_OURS = """
import functools

def wrap(mark):
    def wrap_site(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return f"{mark}({original(*args, **kwargs)})"
        return wrapper
    return wrap_site
"""


def ours(mark: str) -> Callable[..., Any]:
    """A wrap as a patch of this plugin has it: its function is defined in one of the plugin's modules."""
    namespace: dict[str, Any] = {"__name__": "sglang_fastpath.patches.diffusion.for_the_test"}
    exec(_OURS, namespace)
    wrap: Callable[..., Any] = namespace["wrap"](mark)
    return wrap


@pytest.mark.parametrize("first_reverted", ["a", "b"])
def test_two_features_share_a_site_and_revert_in_either_order(linear: ReplicatedLinear, first_reverted: str) -> None:
    before, stock = ReplicatedLinear.extra_repr, linear.extra_repr()
    patches = {mark: Patch() for mark in "ab"}
    for mark, patch in patches.items():
        patch.replace(EXTRA_REPR, ours(mark))
    assert [patch.verify() for patch in patches.values()] == [None, None]
    assert linear.extra_repr() == f"b(a({stock}))"
    patches.pop(first_reverted).revert()
    ((mark, patch),) = patches.items()
    assert patch.verify() is None
    assert linear.extra_repr() == f"{mark}({stock})"
    patch.revert()
    assert ReplicatedLinear.extra_repr is before


def test_a_feature_that_was_reverted_comes_back_around_the_other(linear: ReplicatedLinear) -> None:
    before, stock = ReplicatedLinear.extra_repr, linear.extra_repr()
    inner, outer, again = Patch(), Patch(), Patch()
    inner.replace(EXTRA_REPR, ours("a"))
    outer.replace(EXTRA_REPR, ours("b"))
    inner.revert()
    again.replace(EXTRA_REPR, ours("c"))
    assert linear.extra_repr() == f"c(b({stock}))"
    outer.revert()
    assert again.verify() is None
    assert linear.extra_repr() == f"c({stock})"
    again.revert()
    assert ReplicatedLinear.extra_repr is before


def test_a_feature_that_loses_another_site_leaves_the_shared_one_to_the_other(linear: ReplicatedLinear) -> None:
    forward, before, stock = ReplicatedLinear.forward, ReplicatedLinear.extra_repr, linear.extra_repr()
    inner, outer = Patch(), Patch()
    inner.replace(EXTRA_REPR, ours("a"))
    inner.replace(LINEAR, ours("a"))
    outer.replace(EXTRA_REPR, ours("b"))
    ReplicatedLinear.forward = lambda self, x: x
    assert LINEAR in (inner.verify() or "")
    assert outer.verify() is None
    assert linear.extra_repr() == f"b({stock})"
    outer.revert()
    assert ReplicatedLinear.extra_repr is before
    ReplicatedLinear.forward = forward


@pytest.mark.parametrize("layers", ["foreign alone", "ours around foreign"])
def test_a_foreign_wrapper_beneath_ours_still_loses(linear: ReplicatedLinear, layers: str) -> None:
    """That one of ours lies on top says nothing about what lies beneath it."""
    ReplicatedLinear.extra_repr = shouting(ReplicatedLinear.extra_repr)
    if layers == "ours around foreign":
        ReplicatedLinear.extra_repr = ours("a")(ReplicatedLinear.extra_repr)
    standing = ReplicatedLinear.extra_repr
    lost: list[str] = []
    Patch(on_lost=lost.append).replace(EXTRA_REPR, ours("b"))
    assert ReplicatedLinear.extra_repr is standing
    assert len(lost) == 1
    assert EXTRA_REPR in lost[0]


def test_a_foreign_function_between_two_of_ours_is_noticed(linear: ReplicatedLinear) -> None:
    inner, outer = Patch(), Patch()
    inner.replace(EXTRA_REPR, ours("a"))
    foreign = ReplicatedLinear.extra_repr = lambda self: "foreign"
    outer.replace(EXTRA_REPR, ours("b"))
    assert EXTRA_REPR in (outer.lost or "")
    assert EXTRA_REPR in (inner.verify() or "")
    assert ReplicatedLinear.extra_repr is foreign


def test_a_reverted_patch_holds_nothing_though_its_module_may_still_come(package: str) -> None:
    """A patch's wraps hold the plan with all it has captured; a module that is never imported must not."""

    class Captured:
        pass

    captured = Captured()
    gone = weakref.ref(captured)
    patch = Patch(on_lost=functools.partial(print, captured))
    patch.replace(f"{package}.defining:greet", functools.partial(lambda held, original: original, captured))
    patch.revert()
    del patch, captured
    gc.collect()
    assert gone() is None
