"""A party's trained model on disk: its parameters, and a manifest of what they belong to.

FOLDER/model.safetensors   the parameters
FOLDER/manifest.toml       versions, shapes, the settings all parties share, how raw columns become features

The manifest has digests of the parameters and of itself: a change by accident is noticed. Whoever changes it
on purpose can write new digests too.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_origin

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from vafl.errors import RunFolderError
from vafl.files import write_atomically

FORMAT = 2
TENSORS, MANIFEST = "model.safetensors", "manifest.toml"
_DIGEST = "digest"  # in the manifest: of all its other entries
DEFAULT = "default."  # before a party's name: what stands in for its embedding while it cannot answer
_ENTRIES = {dict: "a section", list: "a list", str: "text", int: "a whole number"}


@dataclass(frozen=True)
class Manifest:
    """What a model's parameters belong to.

    Attributes:
        format: of the folder.
        party: whose model it is; the head is the server's.
        kind: an `embedding` of a client, or the server's `head`.
        vafl, torch: versions that trained it.
        parameters: digest of the file of parameters.
        run: in which run; models of one run belong together.
        records: which records it was trained on; all parties of a run have the same.
        features: shape of one record as the model takes it.
        outputs: of the whole model.
        classes: names of the outputs' classes; empty for a regression.
        parties: the clients, in the order of the table's columns.
        settings: what all parties share, as sections of a configuration.
        shapes: of the parameters.
        schema: how the party's raw columns become features; empty if they are taken as they are.
    """

    party: str
    kind: Literal["embedding", "head"]
    run: str
    records: str
    features: list[int]
    outputs: int
    classes: list[str]
    parties: list[str]
    settings: dict[str, Any]
    schema: dict[str, Any]
    shapes: dict[str, list[int]]
    parameters: str
    format: int
    vafl: str
    torch: str

    def __post_init__(self) -> None:
        for entry in fields(self):
            kind: Any = get_origin(entry.type) or entry.type
            kind = str if kind is Literal else kind
            if not isinstance(getattr(self, entry.name), kind):
                raise ValueError(f"{entry.name} must be {_ENTRIES[kind]}")

    @property
    def config_digest(self) -> str:
        """Tells shared settings apart at a glance."""
        return _entries_digest(self.settings)[:16]

    @property
    def size(self) -> int:
        """How many parameters the model has."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if self.is_parameter(name))

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor of that name is the module's; a head's folder has stand-ins for clients too."""
        return self.kind == "embedding" or not name.startswith(DEFAULT)


@dataclass(frozen=True)
class StoredModel:
    """A model folder as it was read: whole, and of a format known here."""

    path: Path
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    @property
    def defaults(self) -> dict[str, Tensor]:
        """Party -> what stands in for its embedding, [width]; a head has them."""
        known = [name for name in self.manifest.parties if DEFAULT + name in self.tensors]
        return {name: self.tensors[DEFAULT + name] for name in known}

    def load_into(self, module: nn.Module) -> None:
        """Gives the module these parameters.

        Raises:
            RunFolderError: it has others, or others' shapes; the module is as it was.
        """
        own = {name: tensor for name, tensor in self.tensors.items() if self.manifest.is_parameter(name)}
        here = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
        self.require({"shapes": here}, {"shapes": {name: list(tensor.shape) for name, tensor in own.items()}})
        module.load_state_dict(own)

    def require(self, here: Mapping[str, Any], there: Mapping[str, Any] | None = None) -> None:
        """Raises RunFolderError, with all that differs, unless the manifest's entries are those used here."""
        there = {name: getattr(self.manifest, name) for name in here} if there is None else there
        if found := differences(there, here):
            shown = "; ".join(f"{name}: {was} in the model, {now} here" for name, was, now in found[:10])
            more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
            raise RunFolderError(
                f'the model in "{self.path}" was trained for something else. Different: {shown}{more}. '
                "Use the configuration and the columns it was trained with, or train again."
            )


def write_model(
    folder: Path, module: nn.Module, defaults: Mapping[str, Tensor] | None = None, **facts: Any
) -> None:
    """Writes a model folder; a crash leaves the old one, the new one, or one that is refused as damaged.

    Args:
        defaults: for a head, what stands in for each client's embedding.
        facts: the manifest's entries, but for those that follow from the module.
    """
    tensors = module.state_dict() | {DEFAULT + name: tensor for name, tensor in (defaults or {}).items()}
    content = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    manifest = Manifest(
        shapes=shapes,
        parameters=_digest(content),
        format=FORMAT,
        vafl=version("vafl"),
        torch=version("torch"),
        **facts,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TENSORS, content)
    entries = {entry.name: getattr(manifest, entry.name) for entry in fields(manifest)}
    entries[_DIGEST] = _entries_digest(entries)
    ordered = sorted(entries.items(), key=lambda item: isinstance(item[1], dict))  # TOML: sections last
    write_atomically(folder / MANIFEST, tomli_w.dumps(dict(ordered)).encode())


def read_model(folder: Path) -> StoredModel:
    """Reads a model folder.

    Raises:
        RunFolderError: it is missing, damaged, or of another format.
    """
    try:
        document = tomllib.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        content = (folder / TENSORS).read_bytes()
    except FileNotFoundError as error:
        raise RunFolderError(
            f'"{folder}" must be a model folder with {TENSORS} and {MANIFEST}. '
            f"Found no {Path(error.filename).name} there."
        ) from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f'the model in "{folder}" is damaged: {error}.') from error
    if document.get("format") != FORMAT:
        raise RunFolderError(
            f'the model in "{folder}" is of format {document.get("format")}, by vafl {document.get("vafl")}. '
            f"This is vafl {version('vafl')}, which reads format {FORMAT}: use the version "
            "that made it, or train again."
        )
    try:
        digest = document.pop(_DIGEST, "")
        manifest = Manifest(**document)
        if _entries_digest(document) != digest:
            raise ValueError(f"{MANIFEST} is not as it was written")
        if _digest(content) != manifest.parameters:
            raise ValueError(f"{TENSORS} is not the one that {MANIFEST} was written for")
        tensors = load(content)
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != manifest.shapes:
            raise ValueError(f"{TENSORS} does not hold the shapes of {MANIFEST}")
    except (TypeError, ValueError, SafetensorError) as error:
        raise RunFolderError(
            f'the model in "{folder}" is damaged: {error}. Bring it back as the run left it, or train again.'
        ) from error
    return StoredModel(folder, manifest, tensors)


def differences(there: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, value there, value here) of all entries of nested dicts that are not equal."""
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [] if there == here else [(name, _short(there), _short(here))]
    found = []
    for key in dict.fromkeys([*there, *here]):
        place = f"{name}.{key}" if name else str(key)
        found += differences(there.get(key, "nothing"), here.get(key, "nothing"), place)
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entries_digest(entries: Mapping[str, Any]) -> str:
    """Of what the entries say, however the file is laid out."""
    return _digest(json.dumps(entries, sort_keys=True).encode())
