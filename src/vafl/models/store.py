"""Write and read a party's trained model: its parameters, and a manifest that describes them.

FOLDER/model.safetensors   the parameters
FOLDER/manifest.toml       versions, shapes, the settings all parties share, how raw columns become features

A folder may come from another person, so reading it runs no code. Every entry of the manifest is checked by
type and range before it is used. If the manifest names a factory, this module treats the name as text and
does not import it. The manifest has digests of the parameters and of itself, which detect accidental changes.
They are not signatures: an attacker who can write to the folder can write new digests too.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from vafl.conversion import make
from vafl.errors import RunFolderError
from vafl.files import make_private_folder, write_atomically
from vafl.models.decisions import Decision
from vafl.models.settings import EmbeddingSettings, ModelSettings
from vafl.names import LOCAL_CLIENT, SERVER, check_client, check_party

FORMAT = 4
TENSORS, MANIFEST = "model.safetensors", "manifest.toml"
_DIGEST = "digest"  # the manifest's entry with the digest of all other entries
DEFAULT = "default."  # prefix of a party's default embedding, used while the party cannot answer
_LARGEST_MANIFEST = 2**24  # bytes
_DEEPEST = 8  # levels of nested sections and lists
_MOST_AXES = 8
_LARGEST_RECORD = 2**24  # numbers in the features of one record
_MOST_OUTPUTS = 2**20
_WIDEST = 2**20  # of the embeddings
# Versions and digests are printed on terminals, so they must not contain control characters.
_WORD = re.compile(r"[0-9A-Za-z.+_-]{0,100}")


@dataclass(frozen=True)
class Manifest:
    """Describes a model's parameters. The constructor checks every entry.

    Attributes:
        format: the version of the folder's format.
        party: the party that the model belongs to; the server for a head.
        kind: `embedding` for a client's model, `head` for the server's.
        vafl, torch: the versions that trained the model.
        parameters: the digest of the parameter file.
        run: the id of the run. Models work together only if they come from the same run.
        records: the digest of the training records, the same at all parties of a run.
        features: the shape of one record as the model takes it.
        outputs: the number of outputs of the whole model.
        classes: the class names of the outputs; empty for a regression.
        parties: the clients, in the order in which the head combines their embeddings.
        widths: the embedding width of each client, in the same order.
        settings: the settings that all parties share, as sections of a configuration.
        shapes: parameter -> its shape.
        schema: how the party's raw columns become features; empty if they are used unchanged.
        source: the settings of the party's source that decide how its values are read; empty without one.
        embedding: the network that makes the party's embeddings: `model` and `hidden`; empty for a head.
        decision: for a head: how its outputs become probabilities and a class.
    """

    party: str
    kind: Literal["embedding", "head"]
    run: str
    records: str
    features: list[int]
    outputs: int
    classes: list[str]
    parties: list[str]
    widths: list[int]
    settings: dict[str, Any]
    schema: dict[str, Any]
    source: dict[str, Any]
    embedding: dict[str, Any]
    shapes: dict[str, list[int]]
    parameters: str
    format: int
    vafl: str
    torch: str
    decision: Decision = field(default_factory=Decision)

    def __post_init__(self) -> None:
        for name in ("run", "records", "parameters", "vafl", "torch"):
            if not _WORD.fullmatch(getattr(self, name)):
                raise ValueError(
                    f"{name} must be at most 100 letters, digits or .+_-. Found {getattr(self, name)[:40]!r}"
                )
        self._check_parties()
        _check_sizes("features", self.features)
        if len(self.widths) != len(self.parties) or not all(0 < width <= _WIDEST for width in self.widths):
            raise ValueError(
                f"widths must be from 1 to {_WIDEST:,}, one for each of {len(self.parties)} parties. Found "
                f"{_short(self.widths)}"
            )
        if not 1 <= self.outputs <= _MOST_OUTPUTS:
            raise ValueError(f"outputs must be from 1 to {_MOST_OUTPUTS:,}. Found {self.outputs}")
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise ValueError(
                f"classes must be empty, or at least two different names. Found {self.classes[:5]}"
            )
        for name, section in self.settings.items():
            if name != "seed" and not isinstance(section, dict):
                raise ValueError(f"settings.{name} must be a section. Found {section!r}")

    def _check_parties(self) -> None:
        for name in (check_party(self.party), *map(_check_member, self.parties)):
            if self.parties.count(name) > 1:
                raise ValueError(f"parties must name each client once. Found {name} twice")
        owner = [SERVER] if self.kind == "head" else self.parties
        if not self.parties or self.party not in owner:
            raise ValueError(
                f"the party of a model of kind {self.kind} must be one of {owner}. Found {self.party}"
            )

    @property
    def config_digest(self) -> str:
        """A short digest of the shared settings."""
        return _entries_digest(self.settings)[:16]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if self.is_parameter(name))

    def is_parameter(self, name: str) -> bool:
        """Return whether the tensor belongs to the module. A head's folder also has the clients' defaults."""
        return self.kind == "embedding" or not name.startswith(DEFAULT)


@dataclass(frozen=True)
class StoredModel:
    """The content of a model folder, after all checks.

    Attributes:
        path: the folder.
        tensors: the parameters and, in a head's folder, the clients' defaults.
        settings: the [model] section that the model was trained with.
        embedding: the network of a client's model; None for a head.
    """

    path: Path
    manifest: Manifest
    tensors: Mapping[str, Tensor]
    settings: ModelSettings
    embedding: EmbeddingSettings | None = None

    @property
    def has_factory(self) -> bool:
        """Return whether the user's code builds the model."""
        return self.embedding is not None and self.embedding.has_factory

    @property
    def defaults(self) -> dict[str, Tensor]:
        """Party -> its default embedding, [width of the party]. Only a head's folder has them."""
        known = [name for name in self.manifest.parties if DEFAULT + name in self.tensors]
        return {name: self.tensors[DEFAULT + name] for name in known}

    def load_into(self, module: nn.Module) -> None:
        """Copy the stored parameters into the module. The module may be on the meta device, without memory.

        Raises:
            RunFolderError: the module's parameters have other names, shapes or types. It is left unchanged.
        """
        parameters = {
            name: tensor for name, tensor in self.tensors.items() if self.manifest.is_parameter(name)
        }
        self.require({"shapes": _described(module.state_dict())}, {"shapes": _described(parameters)})
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            module.to_empty(device="cpu")
        module.load_state_dict(parameters)

    def require(self, here: Mapping[str, Any], there: Mapping[str, Any] | None = None) -> None:
        """Raise RunFolderError, with a list of differences, unless the manifest has the entries in `here`.

        Args:
            here: the entries that the caller needs.
            there: entries to compare with instead of the manifest's.
        """
        there = {name: getattr(self.manifest, name) for name in here} if there is None else there
        if different := differences(there, here):
            shown = "; ".join(f"{name}: {was} in the model, {now} here" for name, was, now in different[:10])
            more = f"; and {len(different) - 10} more" if len(different) > 10 else ""
            raise RunFolderError(
                "VFL-3041",
                f'the model in "{self.path}" must match this configuration. Found these differences: '
                f"{shown}{more}. Use the configuration and the columns that it was trained with, or train "
                "again.",
            )


class SharedFacts(TypedDict):
    """The entries of a manifest that are the same at all parties."""

    records: str
    outputs: int
    classes: list[str]
    parties: list[str]
    widths: list[int]
    settings: dict[str, Any]


class Facts(SharedFacts):
    """The entries of a manifest that do not follow from the module. They are described in `Manifest`."""

    party: str
    kind: Literal["embedding", "head"]
    run: str
    features: list[int]
    schema: dict[str, Any]
    source: dict[str, Any]
    embedding: dict[str, Any]
    decision: NotRequired[Decision]


def write_model(
    folder: Path, module: nn.Module, defaults: Mapping[str, Tensor] | None = None, **facts: Unpack[Facts]
) -> None:
    """Write a model folder that only its owner can read.

    A crash leaves the old model, the new model, or a folder that `read_model` rejects as damaged.

    Args:
        defaults: for a head: client -> its default embedding.
        facts: the manifest's entries, except those that follow from the module.
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
    # Parameters first, manifest last. After a crash between the two, the old manifest's digest does not match
    # the new parameters, so `read_model` rejects the folder instead of mixing two models.
    make_private_folder(folder)
    write_atomically(folder / TENSORS, content, private=True)
    entries = asdict(manifest)
    if manifest.kind == "embedding":
        del entries["decision"]
    entries[_DIGEST] = _entries_digest(entries)
    ordered = sorted(entries.items(), key=lambda item: isinstance(item[1], dict))  # TOML: sections last
    write_atomically(folder / MANIFEST, tomli_w.dumps(dict(ordered)).encode(), private=True)


def read_model(folder: Path) -> StoredModel:
    """Read and check a model folder, without importing anything that it names.

    Raises:
        RunFolderError: the folder is missing or damaged, has another format, or an entry is out of range.
    """
    document = _read_document(folder / MANIFEST)
    if document.get("format") != FORMAT:
        raise RunFolderError(
            "VFL-3042",
            f'the model in "{folder}" must have format {FORMAT}, which vafl {version("vafl")} reads. Found '
            f"format {document.get('format')}, written by vafl {document.get('vafl')}. Use the version that "
            "wrote it, or train again.",
        )
    try:
        content = (folder / TENSORS).read_bytes()
        _check_nesting(document)
        digest = document.pop(_DIGEST, "")
        manifest = make(Manifest, document)
        if _entries_digest(document) != digest:
            raise ValueError(f"{MANIFEST} has changed since it was written")
        if _digest(content) != manifest.parameters:
            raise ValueError(f"{TENSORS} does not have the digest in {MANIFEST}")
        tensors = load(content)
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != manifest.shapes:
            raise ValueError(f"{TENSORS} does not have the shapes in {MANIFEST}")
        settings = make(ModelSettings, manifest.settings.get("model"), "settings.model")
        is_head = manifest.kind == "head"
        embedding = None if is_head else make(EmbeddingSettings, manifest.embedding, "embedding")
        _check_model(manifest, settings, tensors)
    except FileNotFoundError as error:
        raise _missing(folder, error) from error
    except (OSError, TypeError, ValueError, KeyError, SafetensorError) as error:
        cause = str(error).rstrip(".")
        raise RunFolderError(
            "VFL-3043",
            f'the model in "{folder}" is damaged: {cause}. Restore the folder from a copy, or train again.',
        ) from error
    return StoredModel(folder, manifest, tensors, settings, embedding)


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ValueError(f"{MANIFEST} must have at most {_LARGEST_MANIFEST:,} bytes")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _missing(path.parent, error) from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(
            "VFL-3044",
            f'the model in "{path.parent}" is damaged: {error}. Restore the folder from a copy, or train '
            "again.",
        ) from error


def _missing(folder: Path, error: FileNotFoundError) -> RunFolderError:
    return RunFolderError(
        "VFL-3045",
        f'"{folder}" must be a model folder with {TENSORS} and {MANIFEST}. '
        f"Found no {Path(error.filename).name} there. Choose another folder, or copy the missing file.",
    )


def _check_nesting(value: Any, left: int = _DEEPEST) -> None:
    """Raise ValueError if sections and lists are nested deeper than any manifest that vafl writes."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not left:
        raise ValueError(f"{MANIFEST} must have at most {_DEEPEST} levels")
    for item in inner:
        _check_nesting(item, left - 1)


def _check_sizes(name: str, shape: Sequence[int]) -> None:
    """Raise ValueError unless a record of this shape fits into memory."""
    sizes = 1 <= len(shape) <= _MOST_AXES and all(1 <= size <= _LARGEST_RECORD for size in shape)
    if not sizes or math.prod(shape) > _LARGEST_RECORD:
        raise ValueError(
            f"{name} must be 1 to {_MOST_AXES} sizes, of at most {_LARGEST_RECORD:,} numbers together. Found "
            f"{_short(list(shape))}"
        )


def _check_model(manifest: Manifest, settings: ModelSettings, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the settings give a model with the manifest's outputs, inputs and defaults."""
    outputs = settings.outputs_for(len(manifest.classes))
    if manifest.outputs != outputs:
        raise ValueError(
            f"outputs must be {outputs} for {len(manifest.classes)} classes. Found {manifest.outputs}"
        )
    if manifest.widths != (widths := settings.widths(manifest.parties, outputs)):
        raise ValueError(f"widths must be {widths} by settings.model. Found {_short(manifest.widths)}")
    is_number = settings.loss_for(len(manifest.classes)) == "squared"
    if manifest.kind == "embedding":
        return
    manifest.decision.check_outputs(outputs, 0 if is_number else len(manifest.classes))
    inputs = [settings.head_inputs(manifest.widths)]
    if manifest.features != inputs:
        raise ValueError(f"features of this head must be {inputs}. Found {_short(manifest.features)}")
    width_of = dict(zip(manifest.parties, manifest.widths, strict=True))
    for name, tensor in tensors.items():
        if manifest.is_parameter(name):
            continue
        width = width_of.get(name.removeprefix(DEFAULT))
        if width is None:
            raise ValueError(f"{TENSORS} must hold defaults of the parties only. Found {_short(name)}")
        if (list(tensor.shape), tensor.dtype) != ([width], torch.float32):
            raise ValueError(f"{_short(name)} must be {width} float32 numbers")


def _described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> shape and type as text, to compare and to print."""
    return {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    }


def differences(there: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted name, value there, value here) for every entry of nested dicts that differs."""
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [] if there == here else [(name, _short(there), _short(here))]
    different = []
    for key in dict.fromkeys([*there, *here]):
        dotted = f"{name}.{key}" if name else str(key)
        different += differences(there.get(key, "nothing"), here.get(key, "nothing"), dotted)
    return different


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the numbers of a tensor of any type and device as bytes, for digests."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entries_digest(entries: Mapping[str, Any]) -> str:
    """Digest the entries' values, independent of the file's layout."""
    return _digest(json.dumps(entries, sort_keys=True).encode())


def _check_member(name: str) -> str:
    """Return `name` if it is valid for a client of a trained model, including the label holder's client."""
    return name if name == LOCAL_CLIENT else check_client(name)
