"""Compiles and loads a module of kernels without a GPU, for the tests of fused_kernels.cu and llm_kernels.cu."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from struct import Struct, calcsize
from typing import Any, NamedTuple

from sglang_fastpath.kernels import fused_kernels

ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120")


def compile_source(nvcc: str, source: Path, output: Path, *flags: str) -> str:
    """What nvcc says while it compiles with the flags of the real build."""
    import tvm_ffi.libinfo

    includes = (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())
    command = [nvcc, *fused_kernels._FLAGS, *flags, *(f"-I{folder}" for folder in includes), str(source)]
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class Compiled(NamedTuple):
    """One kernel for one architecture, as ptxas reports it."""

    kernel: str
    architecture: str
    stack_bytes: int
    spilled_bytes: int


def compile_for_all(nvcc: str, module: str, folder: Path) -> list[Compiled]:
    """Each kernel of module.cu for each architecture."""
    targets = [f"-gencode=arch={sm.replace('sm', 'compute')},code={sm}" for sm in ARCHITECTURES]
    source, output = fused_kernels.source_folder() / f"{module}.cu", folder / f"{module}.fatbin"
    report = compile_source(nvcc, source, output, "-fatbin", "-Xptxas=-v", *targets)
    entry = r"Compiling entry function '(\S+)' for '(sm_\d+)'"
    usage = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    return [
        Compiled(name_of(symbol), architecture, int(stack), int(stores) + int(loads))
        for symbol, architecture, stack, stores, loads in re.findall(f"{entry}.*?{usage}", report, re.DOTALL)
    ]


def name_of(symbol: str) -> str:
    """norm_quant for the mangled name of norm_quant_kernel<...>, or of a kernel without variants."""
    found = re.match(r"_ZN8fastpath\d+(\w+?)_kernel[IE]", symbol)
    assert found, symbol
    return found[1]


def hopper_ptx(nvcc: str, module: str, folder: Path) -> dict[str, str]:
    """Symbol -> PTX of each kernel of module.cu for Hopper."""
    output = folder / f"{module}.ptx"
    compile_source(nvcc, fused_kernels.source_folder() / f"{module}.cu", output, "-ptx", "-arch=compute_90")
    bodies = re.split(r"^\.visible \.entry (\w+)\(", output.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(bodies[::2], bodies[1::2], strict=True))


KIND_OF = """
#include <cstddef>
#include <type_traits>
#include <utility>

template <typename T>
constexpr char kind_of() {
  if (std::is_pointer_v<T>) return 'Q';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_same_v<T, int>) return 'i';
  if (std::is_same_v<T, int64_t>) return 'q';
  return 's';
}
#define CHECK(Type, field, kind, offset) \\
  static_assert(offsetof(fastpath::Type, field) == offset, #Type "." #field " is not at " #offset); \\
  static_assert( \\
      kind_of<std::remove_reference_t<decltype((std::declval<fastpath::Type&>().field))>>() == kind, \\
      #Type "." #field " is not packed by " #kind)
"""


def packed_fields(layout: Struct) -> Iterator[tuple[str, int]]:
    """(format character, offset) of each field of a little-endian format without implicit padding."""
    offset = 0
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        repeat = int(count or 1)
        for size in [repeat] if kind in "sx" else [calcsize(f"<{kind}")] * repeat:
            if kind != "x":
                yield kind, offset
            offset += size
    assert offset == layout.size


def check_layouts(nvcc: str, sources: Sequence[str], layouts: Mapping[str, tuple[Struct, str]], folder: Path) -> None:
    """Each C++ struct of the headers among `sources` is laid out as Python packs it.

    layouts: struct -> its format, and the names of the fields in the format's order.
    """
    checks = [f'#include "{name}"' for name in sources if name.endswith(".cuh")]
    for name, (layout, fields) in layouts.items():
        checks.append(f'static_assert(sizeof(fastpath::{name}) == {layout.size}, "size of {name}");')
        for field, (kind, offset) in zip(fields.split(), packed_fields(layout), strict=True):
            checks.append(f"CHECK({name}, {field}, '{kind}', {offset});")
    source = folder / "layout.cu"
    source.write_text(KIND_OF + "\n".join(checks))
    options = ("-c", "-arch=sm_90", f"-I{fused_kernels.source_folder()}", "-diag-suppress=1427")
    compile_source(nvcc, source, folder / "layout.o", *options)


# Loads a module as on a Hopper GPU; its functions look at their parameters before they look for a GPU.
LOAD = """
import importlib, json, os, sys, torch

torch.cuda.get_device_capability = lambda *_: (9, 0)
kernels = importlib.import_module("sglang_fastpath.kernels." + sys.argv[1])
environment, refusals, failure = dict(os.environ), {}, None
try:
    module = kernels.load()
    for name, arguments in json.loads(sys.argv[2]).items():
        try:
            getattr(module, name)(b"short", *arguments)
        except ValueError as error:
            refusals[name] = str(error)
except RuntimeError as error:
    failure = str(error)
print(json.dumps({"refusals": refusals, "failure": failure, "environment kept": environment == os.environ}))
"""


def load_in_a_new_process(
    module: str, arguments: Mapping[str, Sequence[Any]], cuda_home: Path, cache: Path
) -> dict[str, Any]:
    """What `load` of that module does, and what its functions say to parameters that are too short.

    arguments: function -> what it takes behind its parameters.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOAD, module, json.dumps(arguments)],
        env={
            **os.environ,
            "CUDA_HOME": str(cuda_home),
            "TVM_FFI_CACHE_DIR": str(cache),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),  # ninja may be in .venv
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said
