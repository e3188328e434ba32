"""Declare who decides a setting, whether it is a path, and whether it may change when a run resumes.

Each section of the configuration has a default scope, which `Config` declares. A field of a section declares
its own with `setting` where it differs. Everything that depends on the scope reads these declarations: the
agreement that parties compare when they join, the settings a model keeps, the checks of `--resume`, the
paths that are relative to the configuration file, and the documentation.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

Default = TypeVar("Default")
_KEY = "vafl"


class Scope(StrEnum):
    """Who decides a setting."""

    MODEL = "all parties"  # every party must have the same value, and the trained model keeps it
    TRAINING = "all parties, in training"  # every party must have the same value while it trains
    SERVER = "server"  # the server reads it, and no client does
    PARTY = "each party"


@dataclass(frozen=True)
class Declaration:
    """What is declared about a setting or a section.

    Attributes:
        scope: None takes the scope of the section.
        is_path: whether it names a file or folder, relative to the configuration file.
        may_change: whether a run may resume with another value.
    """

    scope: Scope | None = None
    is_path: bool = False
    may_change: bool | None = None


def setting(
    default: Default, *, scope: Scope | None = None, is_path: bool = False, may_change: bool | None = None
) -> Default:
    """Declare a field of a section whose scope differs from the section's, or which is a path."""
    return dataclasses.field(
        default=default, metadata=declared(scope=scope, is_path=is_path, may_change=may_change)
    )


def declared(
    *, scope: Scope | None = None, is_path: bool = False, may_change: bool | None = None
) -> dict[str, Declaration]:
    """Return the metadata of a field without a plain default: `field(metadata=declared(is_path=True))`."""
    return {_KEY: Declaration(scope, is_path, may_change)}


def section(kind: type[Default], scope: Scope, *, may_change: bool = False) -> Default:
    """Declare a section of the configuration and the scope of its fields."""
    return dataclasses.field(default_factory=kind, metadata={_KEY: Declaration(scope, may_change=may_change)})


def declarations(kind: type[Any]) -> Iterator[tuple[str, str, Declaration]]:
    """Yield section, key and the complete declaration of every setting; the section is "" at the top."""
    for field in dataclasses.fields(kind):
        outer = declaration_of(field)
        if not dataclasses.is_dataclass(field.type):
            yield "", field.name, outer
            continue
        for inner in dataclasses.fields(field.type):
            own = declaration_of(inner)
            may_change = outer.may_change if own.may_change is None else own.may_change
            yield (
                field.name,
                inner.name,
                Declaration(own.scope or outer.scope, own.is_path, bool(may_change)),
            )


def paths_of(kind: type[Any]) -> list[str]:
    """Return the names of a section's fields that are paths."""
    return [field.name for field in dataclasses.fields(kind) if declaration_of(field).is_path]


def declaration_of(field: dataclasses.Field[Any]) -> Declaration:
    """Return what is declared about a field; the defaults if nothing is."""
    declaration: Declaration = field.metadata.get(_KEY, Declaration())
    return declaration
