"""Reading and writing sharded safetensors checkpoints one tensor at a time.

A file is opened anew for every tensor: an open one keeps each page it has touched in the process's memory,
so reading a large shard through a single handle would end up with the whole shard resident.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

INDEX_NAME = "diffusion_pytorch_model.safetensors.index.json"
SINGLE_NAME = "diffusion_pytorch_model.safetensors"


class SafetensorsError(Exception):
    """A file or an index that cannot be used; the message names the file and, where there is one, the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says about one tensor."""

    name: str
    file: Path
    dtype: str
    """The format's own name: "BF16", "F32", "F8_E4M3", ..."""
    shape: tuple[int, ...]
    nbytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file in the order of their data; reads the header only.

    Raises SafetensorsError if the header is unreadable or the data is shorter or longer than it says.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= file.stat().st_size - 8:
                raise SafetensorsError(f"{file} is truncated: it ends before its header does")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        available = file.stat().st_size - 8 - length
        for name, entry in entries:
            if entry["data_offsets"][1] > available:
                raise SafetensorsError(
                    f"{file} is truncated: tensor '{name}' ends at byte {entry['data_offsets'][1]} of the data, "
                    f"of which only {available} are there; copy or download the file again"
                )
        with safe_open(file, framework="pt"):  # the library's own validation of offsets, dtypes and shapes
            pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise SafetensorsError(f"{file} is not a readable safetensors file: {error}") from error
    return {
        name: TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]), end - begin)
        for name, entry in entries
        for begin, end in [entry["data_offsets"]]
    }


def read_checkpoint(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of a diffusers component: by its index, or of its only file.

    Raises SafetensorsError for a missing index or shard, and where index and shards disagree.
    """
    index = directory / INDEX_NAME
    if not index.is_file():
        if not (directory / SINGLE_NAME).is_file():
            raise SafetensorsError(
                f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; without one of them it is unknown "
                "which tensors belong to the model"
            )
        return read_header(directory / SINGLE_NAME)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor, shard in weight_map.items():
            shards.setdefault(shard, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(f"{index} is not a readable index: {error!r}") from error
    tensors: dict[str, TensorInfo] = {}
    for shard, names in sorted(shards.items()):
        file = directory / shard
        if Path(shard).name != shard or not file.is_file():
            raise SafetensorsError(f"{index} puts tensor '{names[0]}' into '{shard}', but there is no file {file}")
        header = read_header(file)
        for name in names:
            if name not in header:
                raise SafetensorsError(f"{index} puts tensor '{name}' into '{shard}', but {file} does not hold it")
        for name in header:
            if weight_map.get(name) != shard:
                raise SafetensorsError(f"{file} holds tensor '{name}', which {index} does not put there")
        tensors |= header
    return tensors


def load_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor itself, on the CPU."""
    try:
        with safe_open(info.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(info.name)
    except SafetensorError as error:
        raise SafetensorsError(f"{info.file}: tensor '{info.name}' cannot be read: {error}") from error
    return tensor


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a file that either is there complete, also after a power cut, or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {unfinished}: {error}") from error
    # The library makes files that their owner alone can read; a server often runs as somebody else.
    unfinished.chmod(path.parent.stat().st_mode & 0o666)
    publish(unfinished, path)


def publish(unfinished: Path, path: Path) -> None:
    """Flushes `unfinished` to disk and gives it its name."""
    with unfinished.open("rb") as stream:
        os.fsync(stream.fileno())
    unfinished.rename(path)
