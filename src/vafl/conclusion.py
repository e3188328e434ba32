"""The end of a run: what the kept models give on the held-out rows."""

from collections.abc import Mapping

import polars as pl
import torch
from torch import Tensor

from vafl.data.partition import VerticalData
from vafl.models.losses import probabilities
from vafl.plan import Task, held_out_labels


def score_table(task: Task, data: VerticalData, outputs: Mapping[str, Tensor]) -> pl.DataFrame:
    """Return one line per held-out row: which part it is of, its label and its score.

    The columns are `part` ("validation" or "test"), `label` (the name of the class, or the number) and
    `score`, which is the probability of the second of two classes or the predicted number. Several classes
    have the probability of each instead, `score_0`, `score_1` and so on, in the order of `data.classes`.

    Args:
        outputs: the head's outputs by part, [rows, outputs].
    """
    labels = {part: labels for part, labels in held_out_labels(data).items() if part in outputs}
    names = [part for part, own in labels.items() for _ in range(len(own))]
    known = torch.cat(list(labels.values())) if labels else torch.empty(0)
    seen = torch.cat([outputs[part] for part in labels]) if labels else torch.empty(0, task.outputs)
    columns = {"part": pl.Series(names, dtype=pl.String)}
    if task.loss == "squared" or data.classes is None:
        columns["label"] = pl.Series(known.double().numpy())
        return pl.DataFrame(columns | {"score": pl.Series(seen[:, 0].double().numpy())})
    columns["label"] = pl.Series(data.classes, dtype=pl.String).gather(known.long().numpy())
    shares = probabilities(seen.double(), task.loss).numpy()
    if shares.shape[1] == 2:
        return pl.DataFrame(columns | {"score": pl.Series(shares[:, 1])})
    return pl.DataFrame(columns | {f"score_{place}": pl.Series(own) for place, own in enumerate(shares.T)})
