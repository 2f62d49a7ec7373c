"""What every test shares: `tests/` on the import path, and no trace of the plugin left from one test to the next."""

import functools
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# torch.compile builds C++ on a CPU: minutes for nothing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The three that start engines, several processes each, stay apart.
LONGEST = (
    "test_engine",
    "test_release_matrix",
    "test_flux2_blocks",
    "test_qwen_image_block",
    "test_server",
    "test_step_graph",
    "test_llm_server",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes first: two processes that share the files (`-n 2`) then end at about one time."""
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def plugin_absent(tmp_path: Path) -> Iterator[None]:
    """Starts from an environment without the plugin's variables and ends with SGLang's own objects in place.

    A context of its own, not the `monkeypatch` fixture: what a test patches has to be undone before the plugin is,
    or the undoing would put back a replacement of the plugin that the test had patched over.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in list(os.environ):
            if name.startswith("SGLANG_FASTPATH"):
                patched.delenv(name)
        patched.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield
        from sglang_fastpath import plugin

        plugin.deactivate()
    left = [site for site in _sites() if _is_ours(site)]
    assert not left, f"the test has left replacements of the plugin behind: {', '.join(left)}"


@functools.cache
def _sites() -> frozenset[str]:
    from sglang_fastpath.features import CATALOGUE

    return frozenset(site for feature in CATALOGUE for site in feature.sites)


def _is_ours(site: str) -> bool:
    from sglang_fastpath import hooks

    module, _, qualname = site.partition(":")
    try:
        function = operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):  # not imported, or not in this release
        return False
    return hooks.beneath_ours(function) is not function
