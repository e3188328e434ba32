"""Match columns by name or by pattern (`pay_*`)."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from vafl.errors import DataError


def match_columns(
    columns: Sequence[str], groups: dict[str, tuple[str, ...]], setting: str = "partition.groups"
) -> dict[str, list[int]]:
    """Return the positions of each group's columns.

    Args:
        groups: group -> names and patterns.
        setting: the name of the setting, for error messages.

    Raises:
        DataError: a name or pattern matches no column, a group is empty, or two groups overlap.
    """
    owner: dict[str, str] = {}
    positions: dict[str, list[int]] = {}
    for group, patterns in groups.items():
        where = f"{setting}.{group}"
        names = [name for pattern in patterns for name in _matches(columns, where, pattern)]
        if not names:
            raise DataError(
                "VFL-2081", f"{where}: a party needs at least one column. Found none. List its columns."
            )
        for name in dict.fromkeys(names):
            if name in owner:
                raise DataError(
                    "VFL-2082",
                    f'{setting}: a column must belong to one party only. Found "{name}" claimed by both '
                    f'"{owner[name]}" and "{group}". Remove it from one of them.',
                )
            owner[name] = group
        positions[group] = [columns.index(name) for name in dict.fromkeys(names)]
    return positions


def no_column(path: Path, name: str, columns: Iterable[str]) -> DataError:
    """Return the error for a file that lacks a column, with the closest name as a suggestion."""
    columns = list(columns)
    near = get_close_matches(name, columns, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Its columns: {', '.join(columns[:20])}."
    return DataError("VFL-2083", f'"{path}" has no column "{name}". {hint}')


def _matches(columns: Sequence[str], where: str, pattern: str) -> list[str]:
    """Return the columns that a name or pattern matches; raise DataError if there are none."""
    if pattern in columns:
        return [pattern]  # an exact name comes first: as a pattern, "dose[mg]" would not match itself
    names = [name for name in columns if fnmatchcase(name, pattern)]
    if not names:
        near = get_close_matches(pattern, columns, 1)
        hint = f' Did you mean "{near[0]}"?' if near else f" Columns: {', '.join(columns[:20])}."
        raise DataError("VFL-2084", f'{where}: no column matches "{pattern}".{hint}')
    return names
