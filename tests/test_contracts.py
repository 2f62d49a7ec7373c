"""Contracts: fingerprints, the recorded releases, drift in altered copies, live objects, and the two scripts."""

import ast
import functools
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import tokenize
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_fastpath import contracts
from sglang_fastpath.contracts import Release, check, fingerprint, installed_release, is_stock, recorded
from sglang_fastpath.features import CATALOGUE, contract_targets

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / ".releases"
MATRIX = runpy.run_path(str(ROOT / "scripts/releases.py"))["MATRIX"]
POST_RELEASES = ("0.5.12", "0.5.13", "0.5.15")
PUBLISHED = [
    version
    for number in (f"0.5.{last}" for last in range(11, 24))
    for version in ([number, f"{number}.post1"] if number in POST_RELEASES else [number])
]

QWEN = "sglang.multimodal_gen.runtime.models.dits.qwen_image"
DENOISING = "sglang.multimodal_gen.runtime.pipelines_core.stages.denoising"
LINEAR = "sglang.multimodal_gen.runtime.layers.linear"
FORWARD = f"{QWEN}:QwenImageTransformerBlock.forward"

_installed = installed_release()
assert _installed, "the tests need SGLang"
STOCK: Release = _installed


def source_path(target: str, root: Path) -> Path:
    return root.joinpath(*target.partition(":")[0].split(".")[1:]).with_suffix(".py")


def stock_source(target: str) -> tuple[str, str]:
    """The real file of a target, and its qualified name."""
    return source_path(target, STOCK.root).read_text(), target.partition(":")[2]


def find(tree: ast.Module, qualname: str) -> Any:
    node: Any = tree
    for name in qualname.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    return node


def run_script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def unpacked(version: str) -> Path:
    """The tree of a release from the matrix, unpacked now if nobody has done so yet."""
    done = run_script("releases.py", version)
    assert done.returncode == 0, done.stderr
    return RELEASES / version


# Fingerprints


def add_comments(source: str) -> str:
    """A comment at the end of every logical line."""
    ends = {token.start for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.string == "\n"}
    lines = source.split("\n")
    for row, column in ends:
        lines[row - 1] = f"{lines[row - 1][:column]}  # {row}"
    return "\n".join(lines)


def replace_docstrings(source: str, text: str | None) -> str:
    """Another docstring, or none, in every function and class, however deeply nested."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
            if text is not None or not node.body:
                node.body.insert(0, ast.Expr(ast.Constant(text or "")))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("target", contract_targets())
@pytest.mark.parametrize(
    "edit",
    [
        add_comments,
        lambda source: ast.unparse(ast.parse(source)),
        lambda source: replace_docstrings(source, "Another text."),
        lambda source: replace_docstrings(source, None),
    ],
    ids=["comments", "layout", "other docstrings", "no docstrings"],
)
def test_comments_layout_and_docstrings_do_not_count(target: str, edit: Callable[[str], str]) -> None:
    source, qualname = stock_source(target)
    edited = edit(source)
    assert edited != source
    assert fingerprint(edited, qualname) == fingerprint(source, qualname)


def mutations(node: ast.AST) -> Iterator[tuple[ast.AST, str, object]]:
    """Small changes of behaviour that a node allows: a node, one of its fields, another value for it."""
    if isinstance(node, ast.Constant):
        yield node, "value", "changed" if node.value is None else None
        if isinstance(node.value, bool | int | float):
            yield node, "value", node.value + 0.5
        if isinstance(node.value, bool):
            yield node, "value", int(node.value)
    elif isinstance(node, ast.BinOp):
        yield node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    elif isinstance(node, ast.Compare):
        yield node, "ops", [ast.IsNot() if isinstance(node.ops[0], ast.Is) else ast.Is(), *node.ops[1:]]
    elif isinstance(node, ast.BoolOp):
        yield node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.Name):
        yield node, "id", node.id + "_"
    elif isinstance(node, ast.Attribute):
        yield node, "attr", node.attr + "_"
    elif isinstance(node, ast.keyword):
        yield node, "arg", f"{node.arg}_"
    elif isinstance(node, ast.Call) and node.args:
        yield node, "args", node.args[1:]
    elif isinstance(node, ast.If):
        yield node, "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.FunctionDef):
        yield node, "decorator_list", [*node.decorator_list, ast.Name("cache")]
        yield node, "body", [*node.body, ast.Pass()]
        yield node.args, "defaults", node.args.defaults[:-1] or [ast.Constant("changed")]
        yield node.args, "vararg", None if node.args.vararg else ast.arg("more")


@functools.cache
def stock_function(target: str) -> str:
    """The code of one target alone, without docstrings and without the file around it."""
    source, qualname = stock_source(target)
    return replace_docstrings(ast.unparse(find(ast.parse(source), qualname)), None)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_code_counts(data: st.DataObject) -> None:
    source = stock_function(data.draw(st.sampled_from(contract_targets())))
    tree, written = ast.parse(source), ast.unparse(ast.parse(source))
    # Not every mutant of what stands inside an f-string can be written down.
    in_strings = {inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    choices = [change for node in ast.walk(tree) if node not in in_strings for change in mutations(node)]
    setattr(*data.draw(st.sampled_from(choices)))
    changed, name = ast.unparse(ast.fix_missing_locations(tree)), tree.body[0].name  # type: ignore[attr-defined]
    assume(changed != written)  # a default without a parameter is not written down
    assert fingerprint(changed, name) != fingerprint(source, name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a, b=1): return a", "def f(a, b=2): return a"),
        ("def f(a, b=1): return a", "def f(a=1, b=1): return a"),
        ("def f(a, *, b=1): return a", "def f(a, *, b): return a"),
        ("def f(a): return a", "@g\ndef f(a): return a"),
        ("def f(a): return a", "async def f(a): return a"),
        ("def f(a): return 1", "def f(a): return True"),
        ("def f(a): return 1", "def f(a): return 1.0"),
        ("def f(a): return 0.0", "def f(a): return -0.0"),
        ("def f(a): return b'x'", "def f(a): return 'x'"),
        ("def f(a): return None", "def f(a): return"),
        ("def f(a): return {**a}", "def f(a): return {None: a}"),
        ("def f(a): return a + 1 * 2", "def f(a): return (a + 1) * 2"),
        ("def f(a): return f'{a}'", "def f(a): return f'{a!r}'"),
        ("def f(a):\n if a: b()\n c()", "def f(a):\n if a:\n  b()\n  c()"),
        ("def f(a):\n x = 1\n 'no docstring'", "def f(a):\n x = 1\n 'nor this'"),
        (
            "if x:\n def f(): return 1\nelse:\n def f(): return 2",
            "if x:\n def f(): return 3\nelse:\n def f(): return 2",
        ),
        ("try:\n def f(): return 1\nexcept E:\n def f(): return 2", "try:\n def f(): return 1\nexcept E:\n pass"),
    ],
)
def test_code_counts(one: str, other: str) -> None:
    assert fingerprint(one, "f") != fingerprint(other, "f")


def test_other_functions_do_not_count() -> None:
    source, qualname = stock_source(FORWARD)
    tree = ast.parse(source)
    find(tree, "QwenTimestepProjEmbeddings.forward").body.append(ast.Pass())
    assert fingerprint(ast.unparse(tree), qualname) == fingerprint(source, qualname)
    neighbour = "QwenTimestepProjEmbeddings"  # a class counts with its methods
    assert fingerprint(ast.unparse(tree), neighbour) != fingerprint(source, neighbour)


@pytest.mark.parametrize("qualname", ["absent", "QwenImageTransformerBlock.absent", "forward", "torch"])
def test_missing_name(qualname: str) -> None:
    source, _ = stock_source(FORWARD)
    with pytest.raises(contracts.MissingTarget, match=qualname):
        fingerprint(source, qualname)


# The same fingerprint whichever Python parses


def other_pythons() -> list[str]:
    found = {shutil.which(f"python3.{minor}") for minor in range(11, 16)}
    found |= {str(path) for path in Path.home().glob(".pyenv/versions/3.1[1-9]*/bin/python")}
    candidates = sorted(path for path in found if path)
    return [p for p in candidates if not subprocess.run([p, "-Ic", "import hashlib"], capture_output=True).returncode]


def test_every_python_at_hand_gives_the_recorded_fingerprints() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sglang_fastpath.contracts import measure; "
        "from pathlib import Path; print(*[measure(t, Path(sys.argv[2])) for t in sys.argv[3:]])"
    )
    for python in [sys.executable, *other_pythons()]:
        command = [python, "-Ic", program, str(ROOT), str(STOCK.root), *contract_targets()]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert printed == [recorded()[STOCK.version][target] for target in contract_targets()], python


def as_parsed_by_another_python(tree: ast.AST) -> ast.AST:
    """The tree with what differs between versions: absent, empty and new fields, empty literals in f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.__dict__["type_params"] = []
            node.__class__ = type(type(node).__name__, (type(node),), {"_fields": ("type_params", *node._fields)})
        elif isinstance(node, ast.JoinedStr):
            node.values.append(ast.Constant(""))
        elif isinstance(node, ast.Return) and node.value is None:
            del node.value
    return tree


@pytest.mark.parametrize("target", contract_targets())
def test_differences_between_pythons_do_not_count(target: str) -> None:
    source, qualname = stock_source(target)
    source += "\ndef g(x, w):\n    'Doc.'\n    u = f'{x:{w}}' f'{x!r}' 'a'\n    return\n"
    for name in (qualname, "g"):
        other = as_parsed_by_another_python(find(ast.parse(source), name))
        assert contracts._canonical(other) == contracts._canonical(find(ast.parse(source), name))


# Releases


def test_every_published_release_and_every_target_of_the_catalogue_is_recorded() -> None:
    assert list(recorded()) == PUBLISHED
    for version, record in recorded().items():
        assert set(record) == set(contract_targets()), version
        assert list(record) == sorted(record)


def test_the_installed_release_keeps_its_contracts_and_is_checked_quickly() -> None:
    on_by_default = [feature for feature in CATALOGUE if feature.measured]
    targets = list(dict.fromkeys(target for feature in on_by_default for target in feature.contract))
    assert check(contract_targets(), STOCK) is None
    taken = []
    for _ in range(3):  # the least: a garbage collection of a large heap takes longer than the check
        contracts._definitions.cache_clear()
        start = time.process_time()
        assert check(targets, STOCK) is None
        taken.append(time.process_time() - start)
    assert min(taken) < 0.5  # 0.09 s on a slow core


@pytest.mark.releases
@pytest.mark.parametrize("version", MATRIX)
def test_the_release_matrix_keeps_its_contracts(version: str) -> None:
    release = Release(version, unpacked(version) / "sglang")
    absent = {target for target, recorded_as in recorded()[version].items() if recorded_as is None}
    drift = check(contract_targets(), release)
    assert set(drift.targets if drift else ()) == absent


@pytest.mark.releases
def test_one_release_is_not_taken_for_another() -> None:
    drift = check([FORWARD], Release("0.5.17", unpacked("0.5.23") / "sglang"))
    assert drift and drift.targets == (FORWARD,)


@pytest.fixture
def altered(tmp_path: Path) -> Release:
    """A copy of the installed release that holds the files of the catalogue's targets and may be changed."""
    root = tmp_path / "sglang"
    for target in contract_targets():
        file = source_path(target, root)
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path(target, STOCK.root), file)
    return Release(STOCK.version, root)


def rewrite(release: Release, target: str, change: Callable[[Any], object]) -> None:
    file = source_path(target, release.root)
    tree = ast.parse(file.read_text())
    change(find(tree, target.partition(":")[2]))
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)))


@pytest.mark.parametrize("target", contract_targets())
def test_an_altered_function_drifts_and_is_named(altered: Release, target: str) -> None:
    assert check(contract_targets(), altered) is None
    rewrite(altered, target, lambda function: function.body.append(ast.Pass()))
    drift = check(contract_targets(), altered)
    assert drift and drift.targets == (target,)
    assert target in str(drift) and "changed" in str(drift)


def test_a_rewritten_docstring_is_no_drift(altered: Release) -> None:
    rewrite(altered, FORWARD, lambda function: function.body.insert(0, ast.Expr(ast.Constant("Text."))))
    assert check(contract_targets(), altered) is None


def test_a_renamed_function_and_a_removed_file_are_missing(altered: Release) -> None:
    rewrite(altered, FORWARD, lambda function: setattr(function, "name", "forward_renamed"))
    source_path(f"{LINEAR}:", altered.root).unlink()
    drift = check(contract_targets(), altered)
    assert drift and set(drift.targets) == {FORWARD, *(t for t in contract_targets() if t.startswith(LINEAR))}
    assert f"{FORWARD} is missing" in drift.reason


@pytest.mark.parametrize("damage", [b"def (", b"\xff\xfe", b"x = '\0'"], ids=["syntax", "encoding", "null"])
def test_a_file_that_cannot_be_read_is_a_drift(altered: Release, damage: bytes) -> None:
    source_path(FORWARD, altered.root).write_bytes(damage)
    drift = check([FORWARD], altered)
    assert drift and drift.targets == (FORWARD,) and "cannot be read" in drift.reason


@pytest.mark.parametrize("version", ["0.5.24", "unknown", "0.5.17.dev3+gabcdef"])
def test_an_unrecorded_release_is_a_drift(version: str) -> None:
    drift = check(contract_targets(), Release(version, STOCK.root))
    assert drift and not drift.targets
    assert str(drift) == f"release {version} is not recorded; recorded: 0.5.11 ... 0.5.23"
    assert not contracts.is_recorded(Release(version, STOCK.root))


def test_targets_without_a_record_are_drifts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "contracts.json"
    record.write_text(json.dumps({"releases": {STOCK.version: {FORWARD: None}}}))
    monkeypatch.setattr(contracts, "CONTRACTS_FILE", record)
    monkeypatch.setattr(contracts, "recorded", functools.cache(recorded.__wrapped__))
    other = f"{QWEN}:QwenImageTransformerBlock.__init__"
    drift = check([FORWARD, other], STOCK)
    assert drift and drift.targets == (FORWARD, other)
    assert f"{FORWARD} does not exist in SGLang {STOCK.version}" in drift.reason
    assert f"{other} is not recorded for {STOCK.version}" in drift.reason


@pytest.mark.parametrize("target", ["", "sglang", "sglang.x", "sglang.x:", "sglang.x:f.", "torch.nn:Linear", ":f"])
def test_a_malformed_target_is_an_error_that_quotes_it(target: str) -> None:
    for ask in (lambda: check([target], STOCK), lambda: is_stock(target)):
        with pytest.raises(ValueError, match=r"sglang\.module:Qualified\.name.*" + repr(target)):
            ask()


# Which SGLang would be imported


def release_seen_with(*path: Path, site_packages: bool = True) -> list[str]:
    program = (
        "import sys; from sglang_fastpath.contracts import installed_release; release = installed_release(); "
        "print(*(release and (release.version, release.root)) or ['none'], 'sglang' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, *([] if site_packages else ["-S"]), "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.releases
def test_the_tree_that_comes_first_is_the_release() -> None:
    tree = unpacked("0.5.19")
    assert release_seen_with(tree) == ["0.5.19", str(tree / "sglang"), "False"]
    assert release_seen_with() == [STOCK.version, str(STOCK.root), "False"]


def test_no_release() -> None:
    assert release_seen_with(site_packages=False) == ["none", "False"]


def test_source_trees(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    # So far it is a folder that only happens to be called sglang.
    assert release_seen_with(tmp_path)[0] == STOCK.version
    assert release_seen_with(tmp_path, site_packages=False) == ["none", "False"]
    (package / "__init__.py").touch()
    assert release_seen_with(tmp_path) == ["unknown", str(package), "False"]
    information = tmp_path / "sglang-0.5.16.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n")
    assert release_seen_with(tmp_path)[0] == "0.5.16"
    shutil.copy(STOCK.root / "_version.py", package)
    assert release_seen_with(tmp_path)[0] == STOCK.version  # the dist-info was left behind by another version


# Live objects


# The language models' FlashAttention backend needs sgl_kernel's library, which needs a GPU's driver.
IMPORTABLE = [t for t in contract_targets() if not t.startswith("sglang.srt.layers.attention.flashattention_backend")]


@pytest.fixture(scope="module")
def live() -> ModuleType:
    """SGLang's own modules, imported; they are changed through monkeypatch alone."""
    for target in IMPORTABLE:
        import_module(target.partition(":")[0])
    return import_module(QWEN)


class _OtherPlugin:
    """What another plugin might put in the place of a stock function."""

    @staticmethod
    def replacement(*args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    @staticmethod
    def wrapt_hook(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)


def test_untouched_functions_are_stock(live: ModuleType) -> None:
    assert {target: is_stock(target) for target in IMPORTABLE} == dict.fromkeys(IMPORTABLE)


@pytest.mark.parametrize(
    "target",
    [
        f"{QWEN}:QwenImageTransformer2DModel.get_nunchaku_quant_rules",  # class method
        f"{QWEN}:QwenImageTransformer2DModel.build_modulate_index",  # functools.lru_cache
        f"{DENOISING}:DenoisingStage._build_cache_dit_config",  # static method
        f"{DENOISING}:DenoisingStage.parallelism_type",  # property
        f"{DENOISING}:DenoisingStage._denoise",  # torch.no_grad()
        f"{DENOISING}:DenoisingContext",  # a dataclass with slots
        f"{DENOISING}:DenoisingStage",
        f"{QWEN}:QwenImageTransformerBlock",
    ],
)
def test_stock_decorators_are_stock(live: ModuleType, target: str) -> None:
    assert is_stock(target) is None


def patched_by_hook_registry(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("sglang.srt.plugins.hook_registry")
    monkeypatch.setattr(registry.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(registry.HookRegistry, "_patched", set())
    monkeypatch.setattr(owner, name, vars(owner)[name])  # so that it is put back
    target = f"{owner.__module__}.{owner.__qualname__}.{name}"
    registry.HookRegistry.register(target, _OtherPlugin.around, registry.HookType.AROUND)
    registry.HookRegistry.apply_hooks()


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("plain", r"_OtherPlugin\.replacement"),
        ("wraps", r"test_a_replacement_is_named\.<locals>\.wrapped"),
        ("wrapt", r"\S*FunctionWrapper object calling .*_OtherPlugin\.wrapt_hook"),
        ("partial", "functools.partial object"),
        ("namesake", r"elsewhere\.QwenImageTransformerBlock\.forward"),
        ("disguised neighbour", r"QwenTimestepProjEmbeddings\.forward"),
        ("no_grad", "torch.utils._contextlib"),
        ("hook registry", r"hook_registry\..* calling .*_OtherPlugin\.around"),
    ],
)
def test_a_replacement_is_named(live: ModuleType, kind: str, culprit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    block = live.QwenImageTransformerBlock
    stock = block.forward

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    elsewhere: dict[str, Any] = {"__name__": "elsewhere"}
    exec("class QwenImageTransformerBlock:\n def forward(self): ...", elsewhere)
    neighbour = live.QwenTimestepProjEmbeddings.forward
    replacements = {
        "plain": _OtherPlugin.replacement,
        "wraps": wrapped,
        "wrapt": wrapt.FunctionWrapper(stock, _OtherPlugin.wrapt_hook),
        "partial": functools.partial(stock),
        "namesake": elsewhere["QwenImageTransformerBlock"].forward,
        "disguised neighbour": functools.update_wrapper(FunctionType(neighbour.__code__, vars(live)), stock),
        "no_grad": torch.no_grad()(stock),
    }
    with monkeypatch.context() as patch:
        if kind == "hook registry":
            patched_by_hook_registry(block, "forward", patch)
        else:
            patch.setattr(block, "forward", replacements[kind])
        assert re.match(f"replaced by .*{culprit}", is_stock(FORWARD) or "")
        of_class = is_stock(FORWARD.removesuffix(".forward"))
        assert of_class == f"has forward {is_stock(FORWARD)}"
        assert is_stock(f"{QWEN}:QwenImageTransformerBlock.__init__") is None
    assert is_stock(FORWARD) is None


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("_build_cache_dit_config", staticmethod),
        ("parallelism_type", property),
        ("_denoise", lambda function: function),
    ],
)
def test_replacements_behind_descriptors(
    live: ModuleType, name: str, wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = sys.modules[DENOISING].DenoisingStage
    original = vars(stage)[name]
    function = getattr(original, "fget", None) or getattr(original, "__func__", original)

    @functools.wraps(function)
    def meddling(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr(stage, name, wrap(meddling))
    assert (is_stock(f"{DENOISING}:DenoisingStage.{name}") or "").startswith(f"replaced by {__name__}.")


def test_a_setter_added_to_a_property_is_noticed(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = sys.modules[DENOISING].DenoisingStage
    monkeypatch.setattr(stage, "parallelism_type", stage.parallelism_type.setter(_OtherPlugin.replacement))
    assert "_OtherPlugin.replacement" in (is_stock(f"{DENOISING}:DenoisingStage.parallelism_type") or "")


def test_a_replaced_class_is_named(live: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    subclass = type("Faster", (live.QwenImageTransformerBlock,), {})
    monkeypatch.setattr(live, "QwenImageTransformerBlock", subclass)
    assert is_stock(f"{QWEN}:QwenImageTransformerBlock") == f"replaced by {__name__}.Faster"
    assert is_stock(FORWARD) == f"replaced: {__name__}.Faster does not define forward"
    # A disguise: it claims the stock class's name, but inherits what that one defines.
    subclass.__module__, subclass.__qualname__ = QWEN, "QwenImageTransformerBlock"
    assert is_stock(f"{QWEN}:QwenImageTransformerBlock") is not None
    monkeypatch.setattr(live, "QwenImageTransformerBlock", None)
    assert "NoneType" in (is_stock(FORWARD) or "")


def test_a_name_that_is_only_imported_is_not_defined_there(live: ModuleType) -> None:
    assert live.ReplicatedLinear is sys.modules[LINEAR].ReplicatedLinear
    assert (is_stock(f"{QWEN}:ReplicatedLinear.forward") or "").startswith("is not defined in ")
    assert is_stock(f"{LINEAR}:ReplicatedLinear.forward") is None


def test_a_module_that_is_not_imported_is_left_alone() -> None:
    module = "sglang.multimodal_gen.runtime.models.dits.never_imported"
    assert is_stock(f"{module}:f") == "is not imported"
    assert module not in sys.modules


# The scripts


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, str]:
    """An environment in which pip finds nothing but a wheel of SGLang 9.9.9 with the installed release's files."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "sglang-9.9.9-py3-none-any.whl", "w") as wheel:
        for file in {source_path(target, STOCK.root) for target in contract_targets()}:
            wheel.write(file, file.relative_to(STOCK.root.parent))
        information = "sglang-9.9.9.dist-info"
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def test_releases_are_unpacked_whole_or_not_at_all(tmp_path: Path, wheels: dict[str, str]) -> None:
    folder = tmp_path / "releases"
    (folder / ".9.9.9-abandoned" / "tree").mkdir(parents=True)  # of a run that was killed
    done = run_script("releases.py", "--folder", folder, "9.9.9", "0.0.1", **wheels)
    assert done.returncode == 1
    assert "sglang 9.9.9: unpacked" in done.stdout
    assert "sglang 0.0.1: pip failed" in done.stderr and "No matching distribution" in done.stderr
    assert {path.name for path in folder.iterdir()} == {"9.9.9", ".9.9.9-abandoned"}
    assert check(contract_targets(), Release(STOCK.version, folder / "9.9.9/sglang")) is None


def test_a_release_that_is_there_is_left_alone(tmp_path: Path, wheels: dict[str, str]) -> None:
    (tmp_path / "releases/9.9.9").mkdir(parents=True)
    done = run_script("releases.py", "--folder", tmp_path / "releases", "9.9.9", **wheels)
    assert done.returncode == 0 and "already in" in done.stdout
    assert not list((tmp_path / "releases/9.9.9").iterdir())


def test_a_wheel_gives_the_same_record_as_a_tree(wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in wheels.items():
        monkeypatch.setenv(name, value)
    record = runpy.run_path(str(ROOT / "scripts/record_contracts.py"))["record"]
    targets = (*contract_targets(), f"{QWEN}:Absent.forward", "sglang.absent:f")
    expected = recorded()[STOCK.version] | {f"{QWEN}:Absent.forward": None, "sglang.absent:f": None}
    assert record(["9.9.9"], targets, None) == {"9.9.9": expected}


def test_check_compares_the_file_with_the_sources(altered: Release) -> None:
    before = contracts.CONTRACTS_FILE.read_bytes()
    releases = altered.root.parent.parent / "releases"
    (releases / STOCK.version).mkdir(parents=True)
    altered.root.rename(releases / STOCK.version / "sglang")
    arguments = ("record_contracts.py", "--check", "--releases", releases, STOCK.version)
    agreeing = run_script(*arguments)
    assert agreeing.returncode == 0, agreeing.stderr
    release = Release(STOCK.version, releases / STOCK.version / "sglang")
    rewrite(release, FORWARD, lambda function: function.body.append(ast.Pass()))
    differing = run_script(*arguments)
    assert differing.returncode == 1 and STOCK.version in differing.stderr
    assert contracts.CONTRACTS_FILE.read_bytes() == before


def test_releases_are_written_in_their_order() -> None:
    in_release_order = runpy.run_path(str(ROOT / "scripts/record_contracts.py"))["in_release_order"]
    assert list(in_release_order({version: {} for version in reversed([*PUBLISHED, "0.5.100"])})) == [
        *PUBLISHED,
        "0.5.100",
    ]
