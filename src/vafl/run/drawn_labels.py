"""Randomised training labels, drawn once and stored.

Every draw by randomised response spends epsilon. So a server stores the labels and uses them again when it
resumes.
"""

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
    """Return the randomised labels in the file `path`; draw and store them if the file does not exist.

    Args:
        labels: the true labels, [rows].
        name: the name of the label column.
        records: a digest that identifies the records.
        path: the file; None draws labels without storing them.

    Raises:
        DataError: the file holds labels for another column, other records or another epsilon, or is damaged.
    """
    terms = {"label": name, "epsilon": epsilon, "classes": classes, "records": records, "rows": len(labels)}
    if path is None:
        return randomise(labels, classes, epsilon)
    if not path.is_file():
        drawn = randomise(labels, classes, epsilon)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_once(path, save({"labels": drawn}, {"terms": json.dumps(terms)}), private=True)
    # Always return the labels in the file, not `drawn`. If another server has created the file first, our
    # draw is discarded unused. The labels are on disk before anything is trained on them.
    return _read(path, terms).to(labels.dtype)


def _read(path: Path, terms: dict[str, object]) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            stored = json.loads(file.metadata()["terms"])
            labels: Tensor = file.get_tensor("labels")
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            "VFL-7071", f'the randomised labels in "{path}" are damaged: {error}. Restore them from a backup.'
        ) from error
    if stored != terms:
        differing = [f"{name} {stored.get(name)} (now {terms[name]})" for name in terms]
        raise DataError(
            "VFL-7072",
            f'the labels in "{path}" must have been drawn for this run\'s label, records and epsilon. Found '
            f"{', '.join(differing)}. Set labels.file to another file. That draws new labels and spends "
            "epsilon again.",
        )
    return labels
