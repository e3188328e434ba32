"""Strict conversion of plain documents, as TOML gives them, into frozen dataclasses.

Configurations and model manifests share this code. A value is accepted only if it has the type that the
dataclass declares; the dataclass then checks ranges when it is made.
"""

import dataclasses
import types
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vafl.errors import ConfigError

Made = TypeVar("Made")


def make(kind: type[Made], values: Any, where: str = "") -> Made:
    """Make a dataclass from a dictionary.

    Args:
        where: The dotted name of `values` in the document; errors begin with it.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or is out of range.
    """
    if not isinstance(values, dict):
        raise ConfigError("VFL-1031", f"{where} must be a section. Found {values!r}.")
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, 1, cutoff=0.5)
            hint = f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known)}."
            raise ConfigError("VFL-1032", f'unknown key "{_dotted(where, key)}". {hint}')
    missing = [field.name for field in fields if _is_required(field) and field.name not in values]
    if missing:
        found = ", ".join(values) or "nothing"
        raise ConfigError(
            "VFL-1033", f"{where or 'the document'} needs {', '.join(missing)}. Found only {found}."
        )
    return kind(**{key: _convert(hints[key], value, _dotted(where, key)) for key, value in values.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _convert(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as the declared type, or raise an error that names the expected type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        value = make(kind, value, where)  # type: ignore[arg-type]
    elif origin is Literal:
        _check_choice(arguments, value, where)
    elif origin in (Union, types.UnionType) and (chosen := _by_kind(arguments, value)):
        value = make(chosen, value, where)
    elif origin in (Union, types.UnionType):
        value = _convert_any([kind for kind in arguments if kind is not type(None)], value, where)
    elif origin is tuple and isinstance(value, list | tuple):
        value = tuple(_convert(arguments[0], item, where) for item in value)
    elif origin is list and isinstance(value, list):
        value = [_convert(arguments[0], item, where) for item in value]
    elif origin is dict and isinstance(value, dict):
        value = {key: _convert(arguments[1], item, _dotted(where, key)) for key, item in value.items()}
    elif kind is float and type(value) is int:
        value = _as_float(value, where)
    elif kind is not Any and type(value) is not kind:
        raise ConfigError("VFL-1034", f"{where} must be {_words(kind)}. Found {value!r}.")
    return value


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(
            "VFL-1035", f"{where} must be a number below 1.8e308. Found a larger number."
        ) from None


def _convert_any(kinds: list[Any], value: Any, where: str) -> Any:
    """Return `value` as the first of these types that accepts it."""
    for kind in kinds:
        try:
            return _convert(kind, value, where)
        except ConfigError:
            if len(kinds) == 1:
                raise
    raise ConfigError("VFL-1036", f"{where} must be {' or '.join(map(_words, kinds))}. Found {value!r}.")


def _by_kind(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the dataclass that the entry `kind` chooses; None if the types are not dataclasses with a kind.

    The first dataclass is the default.

    Raises:
        ConfigError: no dataclass is of that kind.
    """
    by_name = {
        field.default: kind
        for kind in kinds
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if field.name == "kind"
    }
    if not by_name or not isinstance(value, dict):
        return None
    name = value.get("kind", next(iter(by_name)))
    _check_choice(tuple(by_name), name, "kind")
    return by_name[name]


def _check_choice(choices: tuple[Any, ...], value: Any, where: str) -> None:
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ConfigError(
            "VFL-1037", f"{where} must be one of {', '.join(map(str, choices))}. Found {value!r}.{hint}"
        )


def _words(kind: Any) -> str:
    if get_origin(kind) in (tuple, list):
        return f"a list, each item {_words(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "a section"
    names = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
