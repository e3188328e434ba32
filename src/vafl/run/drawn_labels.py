"""The labels a server trains on, drawn by randomised response once and kept: drawing again spends again."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vafl.errors import DataError
from vafl.files import write_once
from vafl.privacy.mechanism.labels import randomise


def draw_once(
    labels: Tensor, classes: int, epsilon: float, name: str, records: str, path: Path | None
) -> Tensor:
    """The labels in the file `path`; where there is no such file yet, they are drawn, and on disk before
    anybody sees them.

    Args:
        name: of the label column.
        records: a digest of which records these are.
        path: None keeps them nowhere.

    Raises:
        DataError: the file was drawn for another column, other records or epsilon, or it is damaged.
    """
    terms = {"label": name, "epsilon": epsilon, "classes": classes, "records": records, "rows": len(labels)}
    if path is None:
        return randomise(labels, classes, epsilon)
    if not path.is_file():
        drawn = randomise(labels, classes, epsilon)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_once(path, save({"labels": drawn}, {"terms": json.dumps(terms)}), private=True)
    return _read(path, terms).to(labels.dtype)  # another server's, if it was quicker: ours nobody has seen


def _read(path: Path, terms: dict[str, object]) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads(file.metadata()["terms"])
            labels: Tensor = file.get_tensor("labels")
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError("VFL-7071", f'the drawn labels in "{path}" are damaged: {error}.') from error
    if found != terms:
        differing = [f"{name} {found.get(name)} (now {terms[name]})" for name in terms]
        raise DataError(
            "VFL-7072",
            f'the labels in "{path}" must be drawn for this run\'s label, records and epsilon. Found '
            f"{', '.join(differing)}. Name another labels.file; drawing again spends epsilon again.",
        )
    return labels
