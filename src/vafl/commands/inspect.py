"""`vafl inspect`: describe trained models and their training data, and check that their files are intact."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vafl.commands.configured import as_json
from vafl.data.encoding import Encoder
from vafl.data.sources.base import RecordEncoder
from vafl.data.sources.series_encoder import SeriesEncoder
from vafl.errors import RunFolderError
from vafl.models.store import MANIFEST, StoredModel, read_model
from vafl.run.model_store import MODELS
from vafl.run.plan import encoder_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl inspect`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a run folder, or one party's model folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Read and check every model, then show them. Never import code that a model names."""
    models = find_models(options.path)
    if options.json:
        sys.stdout.write(as_json({"models": [describe(model) for model in models]}))
    else:
        console.print(table_of(models))


def find_models(path: Path) -> list[StoredModel]:
    """Return the model in a model folder, or all models of a run folder."""
    if (path / MANIFEST).is_file():
        return [read_model(path)]
    folders = sorted(entry for entry in (path / MODELS).glob("*") if entry.is_dir())
    if not folders:
        raise RunFolderError(
            "VFL-9101",
            f'"{path}" must be a model folder, or a run folder with {MODELS}/PARTY in it. Found neither. '
            "A run writes its models when it ends.",
        )
    return [read_model(folder) for folder in folders]


def describe(model: StoredModel) -> dict[str, Any]:
    """Return the manifest and values derived from it, for JSON output."""
    manifest = model.manifest
    return {
        "path": str(model.path),
        **asdict(manifest),
        "config_digest": manifest.config_digest,
        "size": manifest.size,
        "defaults": list(model.defaults),
    }


def table_of(models: Sequence[StoredModel]) -> Table:
    """Return a table with a column for each model."""
    table = Table("", box=None, header_style="bold")
    for model in models:
        table.add_column(model.manifest.party)
    columns = [_lines(model) for model in models]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "") for column in columns))
    return table


def _lines(model: StoredModel) -> dict[str, str]:
    manifest, settings, embedding = model.manifest, model.settings, model.embedding
    encoder = encoder_of(model)
    architecture = settings.head if embedding is None else embedding.model
    hidden = list(embedding.hidden if embedding else settings.head_hidden if architecture == "mlp" else ())
    lines = {
        "model": f"{architecture} {hidden or ''}".strip() + ("" if embedding else " (head)"),
        "takes": " x ".join(map(str, manifest.features)),
        "parameters": f"{manifest.size:,}",
        "outputs": ", ".join(manifest.classes) or f"{manifest.outputs} number",
        "data": str(manifest.settings.get("data", {}).get("name", "")),
        "raw columns": _raw(encoder),
        "trained in run": manifest.run,
        "trained on records": manifest.records or "unnamed",
        "config digest": manifest.config_digest,
        "versions": f"vafl {manifest.vafl}, torch {manifest.torch}",
    }
    decision = manifest.decision
    if not embedding and manifest.classes:
        method = decision.calibration.method
        lines["probabilities"] = "as the head outputs them" if method == "none" else f"calibrated by {method}"
        if len(manifest.classes) == 2:
            lines["decision"] = (
                f"{manifest.classes[1]} if its probability is at least {decision.threshold:.4g}"
            )
    if not embedding:
        lines["defaults for absent"] = ", ".join(model.defaults) or "none"
        del lines["raw columns"]
    return lines


def _raw(encoder: RecordEncoder | None) -> str:
    """Return the columns that the model reads, or the kind of its records if they have no columns."""
    if encoder is None:
        return "not encoded"
    columns = encoder.columns if isinstance(encoder, Encoder | SeriesEncoder) else ()
    return ", ".join(column.name for column in columns) or f"none ({encoder.kind})"
