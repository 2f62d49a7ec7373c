"""Contracts: the stock functions that a patch stands in for, and whether they are what it was written for.

A target is a string `sglang.module:Qualified.name`. Its fingerprint is a hash of its syntax tree without
docstrings; `contracts.json`, written by `scripts/record_contracts.py`, holds it for each SGLang release.
`check` compares the installed source with the record, before SGLang is imported; `is_stock` tells, after
the import, whether the live object is the one which that source defines. Nothing here imports SGLang.
"""

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from importlib.resources.abc import Traversable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

CONTRACTS_FILE = Path(__file__).with_name("contracts.json")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class MissingTarget(LookupError):
    """The source defines no function, method or class of this name."""

    def __init__(self, qualname: str) -> None:
        super().__init__(f"the source defines no function, method or class {qualname!r}")


@dataclass(frozen=True)
class Release:
    """An SGLang release as `import sglang` finds it: its version and the folder of the package `sglang`."""

    version: str
    root: Path


@dataclass(frozen=True)
class Drift:
    """Why a contract does not hold; `targets` is empty if the release as a whole is not recorded."""

    targets: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return self.reason


def installed_release() -> Release | None:
    """The release that `import sglang` would load (or has loaded), without importing it; None without one.

    The version is that of this very tree, not of another one later on `sys.path`; "unknown" if nothing tells.
    """
    try:
        spec = util.find_spec("sglang")
    except ValueError:  # a module without a spec sits in sys.modules
        return None
    if spec is None or spec.origin is None:  # a mere folder called sglang has no origin
        return None
    root = Path(spec.origin).parent
    return Release(_version(root), root)


def _version(root: Path) -> str:
    # The tree's own word first: `pip install --target` can leave an older dist-info beside it.
    version_file = root / "_version.py"
    if version_file.is_file():
        text = version_file.read_text(encoding="utf-8")
        if written := re.search(r"""^__version__\b.*=\s*["'](.+)["']""", text, re.MULTILINE):
            return written[1]
    beside = metadata.distributions(name="sglang", path=[str(root.parent)])
    return next((distribution.version for distribution in beside), "unknown")


def fingerprint(source: str, qualname: str) -> str:
    """First 16 hex digits of the SHA-256 of the function, method or class `qualname` in `source`.

    Code, decorators, defaults and annotations count; comments, layout and docstrings do not, nor does the
    Python version that parses. A name that is defined more than once (`if`/`else`, `try`/`except`,
    overloads, property setters) is hashed over all its definitions: the source alone does not say which
    one will be live.

    Raises:
        MissingTarget: nothing of that name is defined.
        SyntaxError: `source` is not Python.
    """
    definitions = _definitions(source).get(qualname)
    if not definitions:
        raise MissingTarget(qualname)
    return hashlib.sha256("\n".join(map(_canonical, definitions)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _definitions(source: str) -> dict[str, list[_Definition]]:
    # Cached by the text itself, so that a file changed on disk is never mistaken for its former self.
    found: dict[str, list[_Definition]] = {}
    for qualname, node in _walk_definitions(ast.parse(source).body, ""):
        found.setdefault(qualname, []).append(node)
    return found


def _walk_definitions(nodes: Iterable[ast.AST], prefix: str) -> Iterator[tuple[str, _Definition]]:
    for node in nodes:
        if isinstance(node, _Definition):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _walk_definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):  # if, try, with, for, ...
            yield from _walk_definitions(ast.iter_child_nodes(node), prefix)


def _canonical(node: object) -> str:
    """A text for a syntax tree that is the same in every Python version, which `ast.dump` is not."""
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # which characters repr() escapes depends on the version's Unicode tables
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!a})"
    fields = {name: getattr(node, name, None) for name in sorted(node._fields)}
    if isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    elif isinstance(node, ast.JoinedStr):
        # Python 3.12 ends a format specification such as {x:{width}} with an empty literal.
        fields["values"] = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
    # A new version's new fields are empty unless its new syntax is used: empty has to equal absent.
    parts = [f"{name}={_canonical(value)}" for name, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({','.join(parts)})"


def measure(target: str, root: Traversable) -> str | None:
    """The fingerprint of `target` in the package folder `root`, on disk or in a wheel; None if it is absent.

    Raises:
        ValueError: `target` is not of the form `sglang.module:Qualified.name`.
        OSError, SyntaxError, UnicodeDecodeError: its source cannot be read.
    """
    module, qualname = _split(target)
    file = _source_file(module, root)
    try:
        return fingerprint(file.read_text(encoding="utf-8"), qualname) if file else None
    except MissingTarget:
        return None


def _split(target: str) -> tuple[str, str]:
    module, _, qualname = target.partition(":")
    if not module.startswith("sglang.") or not all(part.isidentifier() for part in qualname.split(".")):
        raise ValueError(f"a contract target looks like 'sglang.module:Qualified.name', not {target!r}")
    return module, qualname


def _source_file(module: str, root: Traversable) -> Traversable | None:
    *folders, last = module.split(".")[1:]
    folder = root.joinpath(*folders)
    candidates = folder.joinpath(f"{last}.py"), folder.joinpath(last, "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


@functools.cache
def recorded() -> dict[str, dict[str, str | None]]:
    """`contracts.json`: release -> target -> fingerprint, None where the release lacks the target."""
    releases: dict[str, dict[str, str | None]] = json.loads(CONTRACTS_FILE.read_text())["releases"]
    return releases


def is_recorded(release: Release) -> bool:
    """Whether `contracts.json` knows this version at all."""
    return release.version in recorded()


def check(targets: Sequence[str], release: Release) -> Drift | None:
    """None if the source of `release` holds each target as recorded for that version; else what differs.

    Raises ValueError for a target that is not of the form `sglang.module:Qualified.name`.
    """
    if not is_recorded(release):
        known = list(recorded())
        return Drift((), f"release {release.version} is not recorded; recorded: {known[0]} ... {known[-1]}")
    record = recorded()[release.version]
    failures = {target: failure for target in targets if (failure := _failure(target, record, release))}
    return Drift(tuple(failures), "; ".join(failures.values())) if failures else None


def _failure(target: str, record: dict[str, str | None], release: Release) -> str | None:
    _split(target)
    if target not in record:
        return f"{target} is not recorded for {release.version}: run scripts/record_contracts.py"
    if record[target] is None:
        return f"{target} does not exist in SGLang {release.version}"
    try:
        found = measure(target, release.root)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{target} cannot be read: {error}"
    if found == record[target]:
        return None
    change = "changed" if found else "missing"
    return f"{target} is {change} in this copy of SGLang {release.version} ({release.root})"


def is_stock(target: str) -> str | None:
    """None if the live `target` is the very object that the installed source defines.

    Otherwise what is to be said of it, such as "replaced by other_plugin.hooks.forward". Decorators that the
    source itself names are stock, any other wrapper is not. A class is stock if all that its body defines is.
    A module that nobody has imported is left alone and is no match.

    Raises ValueError for a target that is not of the form `sglang.module:Qualified.name`.
    """
    module_name, qualname = _split(target)
    module, release = sys.modules.get(module_name), installed_release()
    if module is None or release is None:
        return "is not imported"
    file = _source_file(module_name, release.root)
    if not isinstance(file, Path):
        return f"has no source in {release.root}"
    definitions = _definitions(file.read_text(encoding="utf-8"))
    names = [name for name in definitions if f"{name}.".startswith(f"{qualname}.")]
    if not names:
        return f"is not defined in {file}"
    for name in names:
        if difference := _difference(module, name, definitions[name], file):
            member = name[len(qualname) + 1 :]
            return f"has {member} {difference}" if member else difference
    return None


def _difference(module: ModuleType, qualname: str, definitions: list[_Definition], file: Path) -> str | None:
    owner: Any = module
    *classes, name = qualname.split(".")
    for class_name in classes:
        owner = vars(owner).get(class_name)
        if not _is_class(owner):
            return f"replaced: {module.__name__}.{class_name} is {_name(owner)}"
    if classes and name.startswith("__") and not name.endswith("__"):
        name = f"_{classes[-1].lstrip('_')}{name}"
    if name not in vars(owner):
        return f"replaced: {_name(owner)} does not define {name}"
    live = vars(owner)[name]
    if _is_class(live):
        same = (live.__module__, live.__qualname__) == (module.__name__, qualname)
        return None if same else f"replaced by {_name(live)}"
    stock_wrappers = _decorator_modules(definitions, vars(module))
    for function in _functions(live):
        while not _is_compiled_from(function, qualname, file):
            if _module_of(function) not in stock_wrappers or not hasattr(function, "__wrapped__"):
                return f"replaced by {_culprit(function)}"
            function = function.__wrapped__
    return None


# type(), not isinstance(), from here on: a proxy such as wrapt's claims to be an instance of what it wraps.
def _is_class(live: object) -> bool:
    return issubclass(type(live), type)


def _functions(live: Any) -> list[Any]:
    """What a class attribute calls."""
    if type(live) in (staticmethod, classmethod):
        return [live.__func__]
    if type(live) is property:
        return [function for function in (live.fget, live.fset, live.fdel) if function]
    return [live.func] if type(live) is functools.cached_property else [live]


def _is_compiled_from(live: Any, qualname: str, file: Path) -> bool:
    # functools.wraps copies __module__ and __qualname__; the code object tells the truth.
    if type(live) is not FunctionType or live.__code__.co_qualname != qualname:
        return False
    return Path(live.__code__.co_filename).resolve() == file.resolve()


def _decorator_modules(definitions: list[_Definition], namespace: dict[str, Any]) -> set[str]:
    """The modules whose code the decorators in the source wrap around a definition."""
    modules: set[str] = set()
    for decorator in (decorator for node in definitions for decorator in node.decorator_list):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name, *attributes = ast.unparse(called).split(".")
        found = namespace.get(name)
        for attribute in attributes:
            found = getattr(found, attribute, None)
        # The wrapper of a class such as torch.no_grad is written in one of its bases.
        modules.update(str(getattr(base, "__module__", None)) for base in getattr(found, "__mro__", (found,)))
    return modules


def _module_of(live: Any) -> str:
    return str(live.__globals__.get("__name__") if type(live) is FunctionType else type(live).__module__)


def _name(live: Any) -> str:
    if type(live) is FunctionType:
        return f"{_module_of(live)}.{live.__code__.co_qualname}"
    if type(live) is ModuleType:
        return live.__name__
    return f"{live.__module__}.{live.__qualname__}" if _is_class(live) else f"a {_name(type(live))} object"


def _culprit(live: Any) -> str:
    """Names a replacement; for an all-purpose wrapper (HookRegistry's, wrapt's) also the hook it calls."""
    if type(live) is FunctionType:
        held = [*inspect.getclosurevars(live).nonlocals.values()]
        held = [value for value in held if value is not getattr(live, "__wrapped__", None)]
    else:
        held = [getattr(live, "_self_wrapper", None)]
    return " calling ".join([_name(live), *(_name(value) for value in held if type(value) is FunctionType)])
