"""Trained models, kept in folders and taken up again: between a run's plan and what lies on disk."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vafl.build import Run
from vafl.config import Config
from vafl.data.partition import Party, VerticalData
from vafl.errors import ConfigError, RunFolderError
from vafl.files import make_private_folder
from vafl.models.embeddings import make_embedding
from vafl.models.folder import StoredModel, read_model, write_model
from vafl.models.heads import make_head
from vafl.names import SERVER, check_party
from vafl.plan import Plan, encoder_of, inputs_of
from vafl.protocol.masked_server import SumTable
from vafl.protocol.rows import Matrix, Rows, mean_of_rows
from vafl.protocol.table import FOREVER, EmbeddingTable

MODELS = "models"  # in a run folder: one folder for each party's model
SPLIT = ("test_fraction", "validation_fraction")
_OWN_WAYS: dict[str, tuple[str, ...]] = {  # need not be the same everywhere and always
    "data": ("path", "folder"),
    "partition": (),
    "model": ("metric",),
    "privacy": ("ledger", "mu_max", "delta"),
}


def model_folder(run: Path, party: str) -> Path:
    """Return the folder in which a run keeps this party's model.

    Raises:
        ConfigError: No party can be called that, so the path might lead out of the run.
    """
    return run / MODELS / check_party(party)


def run_name(number: int) -> str:
    """A run's random number as manifests have it."""
    return f"{number:016x}"


def keep_embedding(plan: Plan | Run, index: int, path: Path, run: str) -> None:
    """Write client `index`'s trained model into the run folder `path`; `run` is the run's name."""
    party = plan.data.parties[index]
    facts: dict[str, Any] = {
        "party": party.name,
        "kind": "embedding",
        "features": list(party.features.shape[1:]),
        "schema": {} if party.encoder is None else party.encoder.to_dict(),
        "run": run,
    }
    write_model(_make_model_folder(path, party.name), plan.models[index], **facts, **_shared(plan))


def keep_head(plan: Plan | Run, defaults: Mapping[str, Tensor], path: Path, run: str) -> None:
    """Write the trained head into the run folder `path`, with the defaults for absent clients."""
    model = plan.config.model
    inputs = model.head_inputs(len(plan.data.parties), plan.task.outputs)
    facts: dict[str, Any] = {"party": SERVER, "kind": "head", "features": [inputs], "schema": {}, "run": run}
    write_model(_make_model_folder(path, SERVER), plan.head, defaults, **facts, **_shared(plan))


def _make_model_folder(run: Path, party: str) -> Path:
    """Make the folder of a party's model; neither it nor RUN/models can be read by others."""
    folder = model_folder(run, party)
    make_private_folder(folder.parent)
    return folder


def keep_all(run: Run, path: Path) -> None:
    """Writes every model of a run that was one process."""
    tensors = [tensor for module in (*run.models, run.head) for tensor in module.state_dict().values()]
    name = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
    for index in range(len(run.models)):
        keep_embedding(run, index, path, name)
    masked = run.config.privacy.secure_sum
    defaults = {} if masked else dict(_simulated(run))
    keep_head(run, defaults, path, name)


def _simulated(run: Run) -> Iterator[tuple[str, Tensor]]:
    """`stand_ins` of a run that was one process."""
    held_out = np.arange(run.data.rows, run.data.parts.total)
    for party, cells in zip(run.data.parties, run.evaluator.embeddings(), strict=True):
        yield party.name, _mean(cells.numpy(), _telling(party, held_out) - run.data.rows)


def stand_ins(data: VerticalData, table: EmbeddingTable, measured: Rows) -> dict[str, Tensor]:
    """What stands in for each client that cannot answer, as the server's table knows it: the embedding
    learnt for records that the client lacks, or its mean where none is lacking.

    There is none under a secure sum.

    Args:
        measured: held-out rows whose embeddings are of the models as they are kept; a client that has none
            of them in the table is judged by its training rows.
    """
    found = {}
    for client, party in enumerate([] if isinstance(table, SumTable) else data.parties):
        for rows in (measured, np.arange(data.rows)):
            known = rows[table.stored_at[rows, client] > -FOREVER]
            if len(known):
                found[party.name] = _mean(table.column(client), _telling(party, known))
                break
    return found


def _telling(party: Party, rows: Rows) -> Rows:
    """Those of the rows that the party lacks: its model says of all of them what it learnt to say of people
    it does not know. All of them, if it lacks none."""
    if party.ids is None:
        return rows
    lacked = party.ids.is_null().to_numpy()[rows]
    return rows[lacked] if lacked.any() else rows


def _mean(cells: Matrix, rows: Rows) -> Tensor:
    return torch.from_numpy(mean_of_rows(cells, rows))


def open_model(config: Config, run: Path, party: str) -> StoredModel:
    """Read a party's trained model from a run folder.

    Raises:
        RunFolderError: There is none, or it was trained for another configuration.
    """
    stored = read_model(model_folder(run, party))
    stored.require({"party": party, "settings": shared_settings(config)})
    return stored


def rebuild(stored: StoredModel, factory: str = "") -> nn.Module:
    """Return the trained module, in evaluation mode.

    A model folder cannot make vafl import anything. If its model comes from a `package.module:Factory`, that
    is imported only if the user names the same factory.

    Args:
        factory: model.embedding of the user's own configuration, or the name given on the command line.

    Raises:
        RunFolderError: The folder names a factory that the user does not, or its entries do not fit together.
    """
    settings, manifest = stored.settings, stored.manifest
    is_head = manifest.kind == "head"
    encoder = None if is_head else encoder_of(stored)
    inputs = () if encoder is None else inputs_of(encoder)
    if settings.has_factory and not is_head:
        if settings.embedding != factory:
            raise _not_named(stored, factory)
        module = make_embedding(settings, manifest.features, manifest.outputs, inputs)
    else:
        try:
            # Without memory: the sizes are the manifest's, and only the parameters in the file prove them.
            with torch.device("meta"):
                if is_head:
                    module = make_head(settings, len(manifest.parties), manifest.outputs)
                else:
                    module = make_embedding(settings, manifest.features, manifest.outputs, inputs)
        except (ConfigError, RuntimeError) as error:
            raise RunFolderError(f'the manifest in "{stored.path}" describes no model: {error}') from error
    stored.load_into(module)
    return module.eval()


def _not_named(stored: StoredModel, factory: str) -> RunFolderError:
    named = stored.settings.embedding
    return RunFolderError(
        f'the model in "{stored.path}" is made by "{named}", which is code. vafl imports it only if you name '
        f"it. Found {factory or 'no factory'}. If you trust that code, say --embedding {named}, or set "
        "model.embedding in your own configuration."
    )


def shared_settings(config: Config) -> dict[str, Any]:
    """What must be the same at all parties, in training and when the model is used.

    Where parties bring tables, those may be others by then: how their rows were split does not matter.
    """
    document, tables = config.document(), config.data.is_tabular
    shared: dict[str, Any] = {} if tables else {"seed": config.seed}
    for section in ("data", "partition", "model", "privacy"):
        own = _OWN_WAYS[section] + (SPLIT if tables else ())
        shared[section] = {key: value for key, value in document[section].items() if key not in own}
    shared["privacy"]["mode"] = config.privacy.kind
    return shared


def _shared(plan: Plan | Run) -> dict[str, Any]:
    data = plan.data
    return {
        "records": data.record_digest,
        "outputs": plan.task.outputs,
        "classes": list(data.classes or ()),
        "parties": [party.name for party in data.parties],
        "settings": shared_settings(plan.config),
    }
