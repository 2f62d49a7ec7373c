"""Apply, verify, revert: how a stock function is replaced, and the only code that looks into SGLang's registries.

SGLang's `HookRegistry` is read but not used to apply: it cannot undo, it logs a failure and goes on, and once it
has patched a target it ignores every later hook on it, so a feature applied through it would shut other plugins
out. A replacement set directly composes both ways: a hook that another plugin registers later wraps ours. Patches of
this plugin compose, too: on a site that two features share, the later one wraps the earlier one, and patches are
reverted in the opposite order.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from sglang_fastpath import contracts

logger = logging.getLogger("sglang_fastpath")

# What is in place now, by the identity of the object that took the original's place.
_replacements: dict[int, "Replacement"] = {}

# Builds the replacement from the original; both are plain functions (a static method's underlying function).
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_PACKAGE = __name__.partition(".")[0]
_REGISTRIES = (
    "sglang.srt.plugins.hook_registry",
    "sglang.multimodal_gen.runtime.platforms.plugins",
)


@dataclass
class Replacement:
    """One stock attribute that is ours now: where it is, what was there and what is."""

    target: str
    owner: Any
    name: str
    original: Any
    replacement: Any
    beneath: "Replacement | None" = None
    """The replacement of this plugin that was there, if it was one: it may be reverted on its own."""
    reverted: bool = False

    def live(self) -> Any:
        """What a call must reach here now: ours, or what was there before."""
        if not self.reverted:
            return self.replacement
        return self.beneath.live() if self.beneath else self.original

    def revert(self) -> None:
        """Puts the original object back everywhere, unless somebody else has replaced ours since."""
        self.reverted = True
        _replacements.pop(id(self.replacement), None)
        original = self.live()
        if isinstance(self.owner, ModuleType):
            for module, name in _importers(self.replacement, self.owner):
                setattr(module, name, original)
        if vars(self.owner).get(self.name) is self.replacement:
            setattr(self.owner, self.name, original)

    def lost_to(self) -> str | None:
        """Why calls no longer reach our replacement, or None if they do."""
        live = vars(self.owner).get(self.name)
        if live is self.replacement:
            return None
        if replacing := _replacing_plugin(self.target):
            return f"{self.target} replaced by {replacing}"
        if any(layer is self.replacement for layer in _layers(live)):
            return None
        return f"{self.target} replaced by {_describe(live)}"


class Patch:
    """The replacements that one feature (or one seam of the plugin) needs: all of them or none.

    Targets are `module:qualified.name`. A module that is not imported yet is patched as soon as it is, before
    any other module can copy a name out of it.
    """

    def __init__(self, *, on_lost: Callable[[str], None] | None = None) -> None:
        self.replacements: list[Replacement] = []
        self.lost: str | None = None
        self._on_lost = on_lost
        self._reverted = False
        # Here, not in the hooks that wait for a module: those stay for good, and would keep what a wrap holds.
        self._wraps: dict[str, Wrap] = {}
        self._undo: list[Callable[[], None]] = []

    def replace(self, target: str, wrap: Wrap, *, stock_only: bool = True) -> None:
        """Replaces `target` by `wrap(original)`, now or when its module is imported.

        With `stock_only`, a target that is not stock's own function any more is left alone, the patch is lost as
        a whole, and `on_lost` is told why. Wrappers that another plugin put around it with SGLang's registry
        are composed with; its replacements are not.
        """
        module_name, _, qualname = target.partition(":")
        self._wraps[target] = wrap

        def patch_module(module: ModuleType) -> None:
            waiting = self._wraps.get(target)
            if waiting is None or self.lost:
                return
            try:
                self._replace_in(module, target, qualname, waiting, stock_only)
            except AttributeError as error:
                self._lose(f"{target} is missing: {error}")

        wrapt.register_post_import_hook(patch_module, module_name)

    def call_when_imported(self, module_name: str, apply: Callable[[], Callable[[], None]]) -> None:
        """Runs `apply` once the module is imported; what it returns undoes it in `revert`."""

        def patch_module(module: ModuleType) -> None:
            if not self._reverted:
                self._undo.append(apply())

        wrapt.register_post_import_hook(patch_module, module_name)

    def verify(self) -> str | None:
        """Checks that every replacement is still reached; if one is not, reverts the others and says why."""
        for replacement in self.replacements:
            if self.lost is None and (why := replacement.lost_to()):
                self._lose(why)
        return self.lost

    def revert(self) -> None:
        """Undoes everything, last replacement first. Modules imported later stay stock."""
        self._reverted = True
        self._wraps.clear()
        self._on_lost = None
        while self.replacements:
            self.replacements.pop().revert()
        while self._undo:
            self._undo.pop()()

    def _lose(self, why: str) -> None:
        self.lost = why
        while self.replacements:
            self.replacements.pop().revert()
        if self._on_lost:
            self._on_lost(why)

    def _replace_in(self, module: ModuleType, target: str, qualname: str, wrap: Wrap, stock_only: bool) -> None:
        owner: Any = module
        *path, name = qualname.split(".")
        for part in path:
            owner = getattr(owner, part)
        if name not in vars(owner):
            raise AttributeError(f"{owner!r} defines no {name!r}")
        original = vars(owner)[name]
        foreign = (
            contracts.is_stock(target) if stock_only and not _is_ours_on_stock(original, module, qualname) else None
        )
        if foreign and (replacing := _replacing_plugin(target)):
            self._lose(f"{target} {foreign} ({replacing})")
            return
        if foreign and not (_registered(target) and _is_stock_beneath(original, module, qualname)):
            self._lose(f"{target} {foreign}")
            return
        static = isinstance(original, staticmethod)
        beneath = _replacements.get(id(original))
        inner = original.__func__ if static else original
        wrapped: Any = wrap(_through(beneath, inner) if beneath else inner)
        replacement = staticmethod(wrapped) if static else wrapped
        # A name that this module itself imported is replaced here alone, one that it defines wherever it is copied.
        if owner is module and getattr(original, "__module__", None) == module.__name__:
            for importer, attribute in _importers(original, module):
                setattr(importer, attribute, replacement)
        setattr(owner, name, replacement)
        mine = Replacement(target, owner, name, original, replacement, beneath)
        self.replacements.append(mine)
        _replacements[id(replacement)] = mine


def _through(beneath: Replacement, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Calls what is live beneath: a feature that shares a site may be reverted while this one stays."""

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        live = beneath.live()
        return (live.__func__ if isinstance(live, staticmethod) else live)(*args, **kwargs)

    return call


def _importers(original: Any, owner: ModuleType) -> Iterator[tuple[ModuleType, str]]:
    """Modules that copied the name with `from ... import`: they would go on calling the original."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module is not owner:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    yield module, attribute


def _layers(function: Any) -> Iterator[Any]:
    """A function and everything that it wraps, outermost first."""
    while function is not None:
        yield function
        inner = function.__func__ if isinstance(function, staticmethod | classmethod) else function
        function = getattr(inner, "__wrapped__", None)


def _registered(target: str) -> list[tuple[Any, Any, Any]]:
    """(hook type, hook, source) of every hook that other plugins registered on the target."""
    dotted = target.replace(":", ".")
    loaded = [sys.modules[name] for name in _REGISTRIES if name in sys.modules]
    return [hook for module in loaded for hook in module.HookRegistry._hooks.get(dotted, ())]


def _replacing_plugin(target: str) -> str | None:
    for hook_type, hook, source in _registered(target):
        if hook_type.name == "REPLACE":
            return f"plugin {source.plugin_name}" if source else _describe(hook)
    return None


def _is_stock_beneath(function: Any, module: ModuleType, qualname: str) -> bool:
    """Whether the innermost function that the wrappers end in is the one that the module's file defines."""
    *_, innermost = _layers(function)
    return _is_stock_itself(innermost, module, qualname)


def _is_stock_itself(function: Any, module: ModuleType, qualname: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == module.__file__ and code.co_qualname == qualname


def _is_ours_on_stock(function: Any, module: ModuleType, qualname: str) -> bool:
    """Whether only wrappers of this plugin lie on what the module's file defines: features share a site."""
    inner = function.__func__ if isinstance(function, staticmethod) else function
    return beneath_ours(inner) is not inner and _is_stock_itself(beneath_ours(inner), module, qualname)


def beneath_ours(function: Any) -> Any:
    """The function that this plugin's wrappers lie on; itself, if none does."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith(f"{_PACKAGE}."):
        if not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    return function


def _describe(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
