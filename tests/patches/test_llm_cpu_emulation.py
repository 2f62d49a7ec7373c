"""The language models' FP8 emulation: what it replaces, its undoing, and where it refuses."""

import importlib

import pytest
import torch
from sglang_fastpath.patches.diffusion.fp8_cpu_emulation import w8a8_block_fp8_linear
from sglang_fastpath.patches.llm import cpu_emulation

from sglang_fastpath import envs, plugin

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_the_plugin_emulates_where_it_is_told_to_and_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In stock's server, too, which is what the plugin's is compared with."""
    modules = {name: importlib.import_module(name) for name in cpu_emulation.REPLACED}
    names = [(module, attribute) for name, module in modules.items() for attribute in cpu_emulation.REPLACED[name]]
    stock = [getattr(module, attribute) for module, attribute in names]
    monkeypatch.setenv(envs.EMULATE, "1")
    plugin.register()
    assert modules[cpu_emulation.FP8].dispatch_w8a8_block_fp8_linear() is w8a8_block_fp8_linear
    assert modules[cpu_emulation.ROTARY]._is_cpu is True
    plugin.deactivate()
    assert [getattr(module, attribute) for module, attribute in names] == stock


def test_a_release_without_what_it_replaces_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{cpu_emulation.ROTARY}._is_cpu")
    with pytest.raises(RuntimeError, match=r"SGLang 0\.5\.17 has no sglang\S+base\._is_cpu, .* replaces"):
        cpu_emulation.apply(cpu_emulation.ROTARY)
