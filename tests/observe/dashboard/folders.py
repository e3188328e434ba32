"""Write run folders without running anything."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vafl.observe.evaluation import Evaluation
from vafl.observe.status import ClientStatus, Status

CLIENTS = (
    ClientStatus("bank", 7, 2_000_000, 500_000, gone=False, delay_mean=3.5, delay_max=12),
    ClientStatus("shop", 5, 1_000_000, 250_000, gone=True),
)
BASELINES = {"trivial": {"validation": {"accuracy": 0.25, "log_loss": 1.5}, "test": {"accuracy": 0.24}}}


def written(folder: Path, points: int = 3, summary: dict[str, Any] | None = None, **status: Any) -> Path:
    """Write a run folder with evaluations, and with a status if any of its entries is given."""
    folder.mkdir(parents=True)
    history = [
        Evaluation(
            float(n),
            40 * n,
            10**6 * n,
            10**5 * n,
            1 / (n + 1),
            0.5 + n / 10,
            {"accuracy": 0.5 + n / 10, "log_loss": 1 / (n + 1), "macro_f1": None},
        )
        for n in range(points)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(asdict(point)) + "\n" for point in history))
    if status:
        known = {"title": "async: digits", "metric": "accuracy", "rows": "validation"}
        known |= {"share": 0.4, "seconds": 2.0, "updates": 80, "baselines": BASELINES}
        Status(**{**known, "rate": 40.0, "waiting": "", "clients": CLIENTS, **status}).write(folder)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
