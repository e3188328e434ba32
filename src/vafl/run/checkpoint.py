"""Checkpoints: what a party must not forget, written whole or not at all.

The embedding table is a memory-mapped file, so a checkpoint costs what changed, not what there is. The
small rest (parameters, optimiser, counters) is one safetensors file with a digest of its content. It is
replaced atomically after the table is on disk, and only by finite numbers: a model that has diverged leaves
the last good checkpoint in place. Cells stored after the checkpoint may be in the table's file or not; the
server treats them as lost after a restart and asks for them again.
"""

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vafl.errors import Diverged, RunFolderError
from vafl.files import make_private_file, make_private_folder, reserve, sync_folder, write_atomically

_FILE = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], buffers: Container[str] = ()
) -> None:
    """Write tensors and plain facts (numbers, lists, text) as one file that only its owner can read.

    Args:
        buffers: names of tensors that are not trained, and may be infinite: attention masks are.

    Raises:
        Diverged: a number is NaN or infinite; the checkpoint that was there stays.
        RunFolderError: it cannot be written.
    """
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}  # two may be one
    for name, tensor in plain.items():
        if name not in buffers and not torch.isfinite(tensor).all():
            raise Diverged(
                "VFL-7031",
                f'a checkpoint holds finite numbers only. Found NaN or infinity in "{name}". The last '
                f'checkpoint in "{folder}" is kept: go on from it with --resume.',
            )
    text = json.dumps(facts)
    content = save(plain, {"facts": text, "digest": _digest(text, plain), "facts_digest": _digest(text, {})})
    with _writing(folder / _FILE, len(content)):
        make_private_folder(folder)
        write_atomically(folder / _FILE, content, private=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_checkpoint` wrote last.

    Raises:
        RunFolderError: there is none, or it is damaged.
    """
    with _opened(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, _facts(file, "digest", tensors)


def load_facts(folder: Path) -> dict[str, Any]:
    """Return the facts alone, which are small; raises as `load_checkpoint`."""
    with _opened(folder) as file:
        return _facts(file, "facts_digest", {})


def _facts(file: Any, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the facts, if they and the tensors are as they were written."""
    metadata = file.metadata()
    if _digest(metadata["facts"], tensors) != metadata[kind]:
        raise ValueError("its content does not match its digest")
    facts: dict[str, Any] = json.loads(metadata["facts"])
    return facts


def _digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of everything a checkpoint holds: it detects damage, not forgery."""
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    path = folder / _FILE
    if not path.is_file():
        raise RunFolderError(
            "VFL-7032", f'--resume needs a checkpoint. Found none in "{folder}". Start without --resume.'
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunFolderError(
            "VFL-7033",
            f'the checkpoint "{path}" is damaged: {error}. Restore a copy of it, or start without --resume.',
        ) from error


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Around whatever takes over the tensors of the checkpoint there: they must fit.

    Raises:
        RunFolderError: they are of another model or optimiser.
    """
    try:
        yield
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunFolderError(
            "VFL-7034",
            f'--resume goes on with the model and optimiser of the run in "{folder}". Found others in the '
            f"configuration: {error}. Resume with the [model] and [optimiser] that it began with.",
        ) from error


@contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            "VFL-7035",
            f'"{path}" needs {size:,} bytes on the disk. Found: {error.strerror or error}. Make room there, '
            "or name an --out elsewhere; a run that had begun goes on with --resume.",
        ) from error


def move_checkpoint(folder: Path, to: Path) -> None:
    """Takes the place of what is there."""
    make_private_folder(to)
    (folder / _FILE).replace(to / _FILE)
    sync_folder(to)


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume from."""
    return (folder / _FILE).is_file()


def flatten(prefix: str, state: Any) -> tuple[dict[str, Tensor], Any]:
    """Takes the tensors out of nested dicts and lists: (tensors by name, the rest with their names)."""
    tensors: dict[str, Tensor] = {}

    def strip(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[key, strip(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {"list": [strip(item, f"{name}.{place}") for place, item in enumerate(value)]}
        return value

    return tensors, strip(state, prefix)


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    if "dict" in skeleton:
        return {key: unflatten(item, tensors) for key, item in skeleton["dict"]}
    return [unflatten(item, tensors) for item in skeleton["list"]]


class MappedArray:
    """An array in a private file: changes reach the disk by themselves, and surely at `flush`."""

    def __init__(self, path: Path, shape: tuple[int, ...], kind: npt.DTypeLike, *, fresh: bool) -> None:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        if not fresh and (not path.is_file() or path.stat().st_size != size):
            raise RunFolderError(
                "VFL-7036",
                f'"{path}" must hold {size:,} bytes, as the run had. It is missing or another size.',
            )
        with _writing(path, size):
            if fresh:
                make_private_file(path)
            reserve(path, size)
        self.array = np.memmap(path, dtype=kind, mode="r+", shape=shape)

    def flush(self) -> None:
        self.array.flush()
