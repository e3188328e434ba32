"""Read configurations from TOML files: one file for all parties, or federation.toml and a party's own file.

    federation.toml     what all parties agree on; every party has the same file
    party.toml          what one party chooses alone: its source, embedding, optimiser, budget and network
    run.toml            both in one file, for parties on one machine: [parties.NAME] holds the second part

Each setting declares who decides it (vafl.scope). That says which of the first two files may hold it. A
party's file begins with `party`, its name, and `federation`, the path of the shared file. Relative paths
start at the folder of the file that holds them.
"""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vafl.config.schema import (
    INHERITED,
    Config,
    from_document,
    takes_table_defaults,
    with_clients,
    with_table_defaults,
)
from vafl.data.source_settings import SOURCES
from vafl.errors import ConfigError
from vafl.names import SERVER, check_party
from vafl.scope import Scope, declarations, paths_of

FEDERATION = "federation.toml"  # the name that `vafl init` gives to the shared file
_OWN = ("source", "embedding", "local_steps", *INHERITED)  # in a party's file; [parties.NAME] in one file


def read_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration: one file for all parties, or a party's file with the file that it shares.

    Args:
        overrides: texts `section.key=value` that take precedence over the files.

    Raises:
        ConfigError: a file cannot be read, or a setting is unknown, out of range or in the wrong file.
    """
    return from_document(read_document(path, overrides))


def read_document(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a configuration as nested dictionaries in the form of one file, without checking any value."""
    document = _load(path)
    own: Sequence[str] = ()
    if is_party_file(document):
        document = _merged(path, document)
        own = ("parties", document["party"])
    for override in overrides or []:
        _override(document, override, own)
    _anchor(document, path.parent)  # paths that are absolute by now do not change
    return document


def is_party_file(document: dict[str, Any]) -> bool:
    """Return whether a document is one party's file, which needs the file that all parties share."""
    return "federation" in document


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError("VFL-1021", f'cannot read the config file "{path}": {error.strerror}.') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("VFL-1022", f'"{path}" must be a TOML file. {error}.') from error


def _merged(path: Path, own: dict[str, Any]) -> dict[str, Any]:
    """Return a party's file and the file that it shares as one document.

    The party's settings do not affect the defaults of the shared ones, so all parties get the same defaults.
    """
    own = dict(own)
    name, place = own.pop("party", ""), own.pop("federation")
    if not (isinstance(name, str) and isinstance(place, str) and name and place):
        raise ConfigError(
            "VFL-1025",
            f'"{path}": a party\'s file needs party, its name, and federation, the path of the file that all '
            f"parties share. Found party = {name!r} and federation = {place!r}.",
        )
    check_party(name)
    shared_path = path.parent / place
    shared = _load(shared_path)
    _require_scopes(shared, shared_path, (Scope.MODEL, Scope.TRAINING, Scope.SERVER), "a party's own file")
    scopes = (Scope.PARTY, Scope.SERVER) if name == SERVER else (Scope.PARTY,)
    general = {key: value for key, value in own.items() if key not in ("source", "local_steps")}
    _require_scopes(general, path, scopes, f'the shared file, "{shared_path.name}"')
    _anchor(shared, shared_path.parent)
    shared = with_clients(shared)
    document = with_table_defaults(shared) if takes_table_defaults(shared) else shared
    for key, values in own.items():
        if key in _OWN:
            continue
        section = document.get(key)
        both = isinstance(values, dict) and isinstance(section, dict)
        document = {**document, key: {**section, **values} if both else values}  # type: ignore[dict-item]
    document = {**document, "party": name, "parties": {name: {key: own[key] for key in own if key in _OWN}}}
    _anchor(document, path.parent)
    return document


def _require_scopes(document: dict[str, Any], path: Path, scopes: tuple[Scope, ...], instead: str) -> None:
    """Raise ConfigError if a file holds a setting that belongs into another file.

    Unknown keys pass: `from_document` reports them with a suggestion.

    Args:
        scopes: those of the settings that the file may hold.
        instead: where the others belong.
    """
    known = {(name, key): declared.scope for name, key, declared in declarations(Config)}
    for name, key in _settings(document):
        scope = known.get((name, key), scopes[0])
        if scope not in scopes:
            dotted = f"{name}.{key}" if name else key
            raise ConfigError(
                "VFL-1026",
                f'"{path}": {dotted} is decided by {scope or "each party"}, so it belongs into {instead}. '
                "Move it there.",
            )


def _settings(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the section and the key of each setting in a document; the section is "" at the top."""
    for name, values in document.items():
        if isinstance(values, dict) and name != "parties":
            yield from ((name, key) for key in values)
        else:
            yield "", name


def _override(document: dict[str, Any], text: str, own: Sequence[str] = ()) -> None:
    """Change one setting.

    Args:
        own: in a party's file, the keys of the section with what the party chooses alone.
    """
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("VFL-1023", f'--set takes section.key=value. Found "{text}".')
    if own and keys[0] in _OWN and not _is_shared(keys):
        keys = [*own, *keys]
    *sections, last = keys
    for name in sections:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise ConfigError("VFL-1024", f'--set {text}: "{name}" is not a section.')
    try:
        document[last] = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        document[last] = value.strip()  # a word without quotes is a string: --set rule.name=sync


def _is_shared(keys: Sequence[str]) -> bool:
    """Return whether a setting of a section that a party may have is decided by all parties."""
    scopes = {(name, key): declared.scope for name, key, declared in declarations(Config)}
    return scopes.get((keys[0], keys[-1])) in (Scope.MODEL, Scope.TRAINING)


def _anchor(document: dict[str, Any], folder: Path) -> None:
    """Make relative paths absolute. They start at the configuration file's folder."""
    for name, key, declared in declarations(Config):
        if declared.is_path:
            _anchor_entry(document.get(name), key, folder)
    parties = document.get("parties")
    for name, own in parties.items() if isinstance(parties, dict) else ():
        if not isinstance(own, dict):
            continue
        for section in ("embedding", "privacy"):
            for inner, key, declared in declarations(Config):
                if inner == section and declared.is_path:
                    _anchor_entry(own.get(section), key, folder)
        source = own.get("source")
        if isinstance(source, dict):
            source.setdefault("alignment", f"{name}.alignment.parquet")
            source.setdefault("cache", f"{name}.cache")
            for key in paths_of(SOURCES.get(source.get("kind", "table"), SOURCES["table"])):
                _anchor_entry(source, key, folder)


def _anchor_entry(section: Any, key: str, folder: Path) -> None:
    if isinstance(section, dict) and isinstance(section.get(key), str) and section[key]:
        section[key] = str((folder / section[key]).resolve())
