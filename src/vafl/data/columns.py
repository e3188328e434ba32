"""Columns by name or by pattern (`pay_*`)."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from vafl.errors import DataError


def match_columns(
    columns: Sequence[str], groups: dict[str, tuple[str, ...]], setting: str = "partition.groups"
) -> dict[str, list[int]]:
    """Column numbers of each group; refuses unknown names, empty groups and overlaps.

    `setting` is what the errors call the groups.
    """
    owner: dict[str, str] = {}
    found: dict[str, list[int]] = {}
    for group, patterns in groups.items():
        where = f"{setting}.{group}"
        names = [name for pattern in patterns for name in _matches(columns, where, pattern)]
        if not names:
            raise DataError(
                "VFL-2081", f"{where}: a party needs at least one column. Found none. Name its columns."
            )
        for name in dict.fromkeys(names):
            if name in owner:
                raise DataError(
                    "VFL-2082",
                    f'{setting}: a column belongs to one party. "{name}" is claimed by both '
                    f'"{owner[name]}" and "{group}". Take it out of one of them.',
                )
            owner[name] = group
        found[group] = [columns.index(name) for name in dict.fromkeys(names)]
    return found


def no_column(path: Path, name: str, columns: Iterable[str]) -> DataError:
    """What is said of a file that lacks the column somebody has named."""
    columns = list(columns)
    near = get_close_matches(name, columns, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Its columns: {', '.join(columns[:20])}."
    return DataError("VFL-2083", f'"{path}" has no column "{name}". {hint}')


def _matches(columns: Sequence[str], where: str, pattern: str) -> list[str]:
    if pattern in columns:
        return [pattern]  # a name such as "dose[mg]" is no pattern
    names = [name for name in columns if fnmatchcase(name, pattern)]
    if not names:
        near = get_close_matches(pattern, columns, 1)
        hint = f' Did you mean "{near[0]}"?' if near else f" Columns: {', '.join(columns[:20])}."
        raise DataError("VFL-2084", f'{where}: no column matches "{pattern}".{hint}')
    return names
