"""Checkpoints: a party's durable state, replaced atomically.

- The server's embedding table is a memory-mapped file, so a checkpoint writes only the pages that changed.
- Everything else (parameters, optimiser, counters) is one safetensors file with a digest of its content.

Crash safety rests on three rules:

1. The safetensors file is replaced atomically, and only after the table is on disk. So the table always
   holds at least what the checkpoint refers to.
2. Cells that were stored after the checkpoint may or may not be in the table's file. After a restart the
   server treats them as lost and requests them again.
3. Only finite numbers are written. A model that has diverged leaves the last good checkpoint in place.
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
from vafl.models.store import bytes_of

_FILE = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], buffers: Container[str] = ()
) -> None:
    """Write tensors and plain facts (numbers, lists, text) as one file that only its owner can read.

    Args:
        buffers: names of tensors that are not trained. They may be infinite, as attention masks are.

    Raises:
        Diverged: a number is NaN or infinite. The previous checkpoint stays.
        RunFolderError: the file cannot be written.
    """
    # Clone, because safetensors refuses two names for the same memory (shared parameters).
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    for name, tensor in plain.items():
        if name not in buffers and not torch.isfinite(tensor).all():
            raise Diverged(
                "VFL-7031",
                f'a checkpoint must hold finite numbers only. Found NaN or infinity in "{name}". The '
                f'previous checkpoint in "{folder}" is intact: continue from it with --resume.',
            )
    text = json.dumps(facts)
    content = save(plain, {"facts": text, "digest": _digest(text, plain), "facts_digest": _digest(text, {})})
    with _writing(folder / _FILE, len(content)):
        make_private_folder(folder)
        write_atomically(folder / _FILE, content, private=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts of the last checkpoint.

    Raises:
        RunFolderError: there is no checkpoint, or it is damaged.
    """
    with _opened(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, _facts(file, "digest", tensors)


def load_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of the last checkpoint without reading its tensors.

    Raises:
        RunFolderError: as for `load_checkpoint`.
    """
    with _opened(folder) as file:
        return _facts(file, "facts_digest", {})


def _facts(file: Any, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the facts. Raise ValueError if the facts or the tensors do not match their digest."""
    metadata = file.metadata()
    if _digest(metadata["facts"], tensors) != metadata[kind]:
        raise ValueError("its content does not match its digest")
    facts: dict[str, Any] = json.loads(metadata["facts"])
    return facts


def _digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the facts and tensors. It detects damage, not forgery, because it has no key."""
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor))
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
    """Turn errors from loading a checkpoint's tensors inside the block into RunFolderError.

    Raises:
        RunFolderError: the tensors belong to another model or optimiser.
    """
    try:
        yield
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunFolderError(
            "VFL-7034",
            f'--resume needs the model and optimiser of the run in "{folder}". Found others in the '
            f"configuration: {error}. Resume with the [model] and [optimiser] that the run started with.",
        ) from error


@contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            "VFL-7035",
            f'cannot write {size:,} bytes to "{path}": {error.strerror or error}. Free some space, or choose '
            "another --out. Continue a run that had started with --resume.",
        ) from error


def move_checkpoint(folder: Path, to: Path) -> None:
    """Move the checkpoint in `folder` to the folder `to`, replacing the one there."""
    make_private_folder(to)
    (folder / _FILE).replace(to / _FILE)
    sync_folder(to)


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a checkpoint to resume from."""
    return (folder / _FILE).is_file()


def flatten(prefix: str, state: Any) -> tuple[dict[str, Tensor], Any]:
    """Separate the tensors in nested dicts and lists from the rest, which must be representable as JSON.

    Returns:
        The tensors by name, and the state with each tensor replaced by its name. `unflatten` reverses this.
    """
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
    """Put the tensors back into the state that `flatten` returned."""
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    if "dict" in skeleton:
        return {key: unflatten(item, tensors) for key, item in skeleton["dict"]}
    return [unflatten(item, tensors) for item in skeleton["list"]]


class MappedArray:
    """An array in a memory-mapped file that only its owner can read.

    The operating system writes changes to disk at any time. They are on disk for certain after `flush`.

    Args:
        fresh: create the file; otherwise it must exist and have the right size.

    Raises:
        RunFolderError: the file is missing or has another size, or the disk has no room for it.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], kind: npt.DTypeLike, *, fresh: bool) -> None:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        if not fresh and (not path.is_file() or path.stat().st_size != size):
            raise RunFolderError(
                "VFL-7036",
                f'--resume needs "{path}" with {size:,} bytes. The file is missing or has another size. '
                "Restore it, or start without --resume.",
            )
        with _writing(path, size):
            if fresh:
                make_private_file(path)
            # Allocate the disk space now. Writing to a mapped page without space would kill the process, at
            # any upload and without an error that Python could catch.
            reserve(path, size)
        self.array = np.memmap(path, dtype=kind, mode="r+", shape=shape)

    def flush(self) -> None:
        """Write all changes to disk."""
        self.array.flush()
