"""Trained models, kept in folders and taken up again: between a run's plan and what lies on disk."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vafl.config import Config, from_document, read_document
from vafl.config.agreement import chosen_by_party, sections_of, shared_settings
from vafl.data.columns import match_columns
from vafl.data.partition import Party, VerticalData
from vafl.errors import ConfigError, RunFolderError
from vafl.files import make_private_folder
from vafl.models.decisions import Decision
from vafl.models.embeddings import make_embedding
from vafl.models.heads import make_head
from vafl.models.store import StoredModel, read_model, write_model
from vafl.names import SERVER, check_party, table_owner
from vafl.protocol.messages import EVERYTHING, LONGEST_GROUP
from vafl.protocol.rows import Matrix, Rows, mean_of_rows
from vafl.protocol.secure_sum.server import SumTable
from vafl.protocol.table import FOREVER, EmbeddingTable
from vafl.run.assembly import Run
from vafl.run.plan import Plan, encoder_of, inputs_of
from vafl.scope import Scope

MODELS = "models"  # in a run folder: one folder for each party's model
_NEVER_FROM_THE_RUN = ("ledger",)  # a run folder may come from someone else: it chooses no new files
_PREDICTING = ("seed", "threads", "data", "tables", "partition", "model", "privacy", "network", "prediction")
_SHOWN = 10  # differences in one log line

log = logging.getLogger("vafl.model")


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
        "table": _table_facts(plan.config, party.name),
        "run": run,
    }
    write_model(_make_model_folder(path, party.name), plan.models[index], **facts, **_shared(plan))


def keep_head(
    plan: Plan | Run, decision: Decision, defaults: Mapping[str, Tensor], path: Path, run: str
) -> None:
    """Write the trained head into the run folder `path`.

    Args:
        decision: how its outputs become probabilities and a class.
        defaults: what stands in for each client that cannot answer.
        run: the run's name.
    """
    model = plan.config.model
    inputs = model.head_inputs(len(plan.data.parties), plan.task.outputs)
    facts: dict[str, Any] = {"party": SERVER, "kind": "head", "features": [inputs], "schema": {}, "table": {}}
    facts |= {"run": run, "decision": decision}
    write_model(_make_model_folder(path, SERVER), plan.head, defaults, **facts, **_shared(plan))


def _table_facts(config: Config, party: str) -> dict[str, Any]:
    """Return what decides how the party's table is read, beside the encoder."""
    own = config.tables.get(table_owner(party))
    return {} if own is None else {"missing": list(own.missing)}


def _make_model_folder(run: Path, party: str) -> Path:
    """Make the folder of a party's model; neither it nor RUN/models can be read by others."""
    folder = model_folder(run, party)
    make_private_folder(folder.parent)
    return folder


def keep_all(run: Run, decision: Decision, path: Path) -> None:
    """Write every model of a run that was one process; `decision` is as for `keep_head`."""
    tensors = [tensor for module in (*run.models, run.head) for tensor in module.state_dict().values()]
    name = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
    for index in range(len(run.models)):
        keep_embedding(run, index, path, name)
    masked = run.config.privacy.secure_sum
    defaults = {} if masked else dict(_simulated(run))
    keep_head(run, decision, defaults, path, name)


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


def open_model(run: Path, party: str) -> StoredModel:
    """Read a party's trained model from a run folder.

    Raises:
        RunFolderError: There is none, or it is another party's.
    """
    stored = read_model(model_folder(run, party))
    stored.require({"party": party})
    return stored


def read_deployed(path: Path, overrides: Sequence[str], run: Path, party: str) -> Config:
    """Read the configuration file with which a party uses a trained model; see `as_trained`.

    Log each entry of the file that the model overrides.
    """
    document, stored = read_document(path, list(overrides)), open_model(run, party)
    config = as_trained(document, stored, run)
    if ignored := _overridden(document, config.document()):
        log.warning(
            '"%s" differs from the training of the model in "%s". The model keeps its own settings: %s',
            path,
            run,
            "; ".join(f"{name} is {value}" for name, value in ignored[:_SHOWN]),
        )
    return config


def as_trained(document: Mapping[str, Any], stored: StoredModel, run: Path) -> Config:
    """Return the configuration with which a party uses its trained model.

    The manifest decides everything that changes a prediction, whatever `document` says now: data, partition,
    model, privacy, encoding. The document decides where things are and how they are served: tables,
    network, prediction, threads. For settings that are a party's own, such as privacy.mu_max, the document
    comes first, then the configuration that the training left in the run folder.

    Args:
        document: a configuration as nested dictionaries, as `read_document` returns it. It may be
            incomplete without the `--set` of the training.

    Raises:
        RunFolderError: the document asks for privacy that the model was trained without, or does not name
            the code that makes the model.
        ConfigError: the document is wrong in what it decides.
    """
    manifest, then = stored.manifest, _training_document(run)
    _check_factory(document, stored)
    _check_protection(document, stored)
    whole: dict[str, Any] = {name: value for name, value in document.items() if name in _PREDICTING}
    whole["seed"] = manifest.settings.get("seed", 0)
    for name in (*sections_of(Scope.MODEL), "rule", "schedule"):
        # A manifest may come from someone else. It must not choose files, budgets or addresses.
        own = chosen_by_party(name) if name in sections_of(Scope.MODEL) else ()
        kept = {key: value for key, value in manifest.settings.get(name, {}).items() if key not in own}
        chosen = {key: _entry(document, name, key) or _entry(then, name, key) for key in own}
        chosen |= {key: _entry(document, name, key) for key in _NEVER_FROM_THE_RUN if key in own}
        whole[name] = kept | {key: value for key, value in chosen.items() if value}
    if whole["privacy"].get("mode") == "none":
        # "auto" and "none" protect alike, but only "none" agrees to uploads of people who have a ledger.
        whole["privacy"]["mode"] = _entry(document, "privacy", "mode") or "auto"
    if stored.settings.has_factory and not _names_factory(document, stored):
        whole["model"]["embedding"] = "linear"  # a head is the same for every embedding of its width
    owner = table_owner(manifest.party)
    network, table = document.get("network", {}), _entry(document, "tables", owner)
    if isinstance(network, dict):
        encoding = _entry(manifest.settings, "network", "encoding") or "float32"
        whole["network"] = network | {"encoding": encoding}
    if manifest.table and isinstance(table, dict):
        whole["tables"] = {**document["tables"], owner: {**table, **manifest.table}}
    return from_document(whole)


def _training_document(run: Path) -> dict[str, Any]:
    path = run / "config.toml"
    return read_document(path) if path.is_file() else {}


def _entry(document: Mapping[str, Any], section: str, key: str) -> Any:
    """Return an entry of a section; None where the document has none, or "auto", which leaves it open."""
    entries = document.get(section, {})
    value = entries.get(key) if isinstance(entries, dict) else None
    return None if value == "auto" else value


def _check_factory(document: Mapping[str, Any], stored: StoredModel) -> None:
    """Raise RunFolderError if the model is made by code that the document does not name."""
    own = stored.manifest.kind == "embedding" and stored.settings.has_factory
    if own and not _names_factory(document, stored):
        raise _not_named(stored, str(_entry(document, "model", "embedding") or ""))


def _names_factory(document: Mapping[str, Any], stored: StoredModel) -> bool:
    return bool(_entry(document, "model", "embedding") == stored.settings.embedding)


def _check_protection(document: Mapping[str, Any], stored: StoredModel) -> None:
    """Raise RunFolderError if the document asks for protection that the model was trained without."""
    trained = stored.manifest.settings.get("privacy", {})
    for key in ("mode", "noise", "secure_sum"):
        asked, had = _entry(document, "privacy", key), trained.get(key)
        if asked and asked != "none" and had in (None, "none", 0, False):
            raise RunFolderError(
                "VFL-7131",
                f'the model in "{stored.path}" was trained with privacy.{key} = {had}. Found {asked} in the '
                f"configuration: a model keeps the protection of its training. Train again with {asked}, or "
                f"take privacy.{key} out.",
            )


def _overridden(document: Mapping[str, Any], used: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (dotted name, value that is used) for each entry of the document that is not used."""
    found = []
    for name, entries in document.items():
        if name not in _PREDICTING:
            continue
        pairs = entries.items() if isinstance(entries, dict) else [("", entries)]
        for key, value in pairs:
            now = used[name].get(key) if key else used[name]
            if not isinstance(value, dict) and value not in (now, "auto"):
                found.append((f"{name}.{key}" if key else name, now))
    return found


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
            raise RunFolderError(
                "VFL-7132", f'the manifest in "{stored.path}" describes no model: {error}'
            ) from error
    stored.load_into(module)
    return module.eval()


def feature_groups(
    stored: StoredModel, groups: Mapping[str, tuple[str, ...]], *, each: bool
) -> dict[str, Rows]:
    """Return the features of each group of columns whose importance may be measured, by name.

    Columns of a table have their names. The features of a matrix are called "feature 1" and so on. Images and
    series have none, and neither has a column whose name a message cannot carry.

    Args:
        groups: name -> columns, by name or pattern.
        each: whether to name each column as well.

    Raises:
        DataError: a group names a column that the model does not use.
    """
    encoder, features = encoder_of(stored), stored.manifest.features
    columns: dict[str, list[int]] = {}
    if encoder is not None:
        first = 0
        for own in encoder.columns:
            last = first + len(own.names(encoder.form))
            columns[own.name] = list(range(first, last))
            first = last
    elif len(features) == 1:
        columns = {f"feature {number + 1}": [number] for number in range(features[0])}
    names = list(columns)
    found = {}
    for name, patterns in groups.items():
        chosen = match_columns(names, {name: patterns}, f"tables.{stored.manifest.party}.groups")[name]
        found[name] = [place for column in chosen for place in columns[names[column]]]
    if each:
        found = columns | found
    fits = {name for name in found if name.isprintable() and name != EVERYTHING}
    return {
        name: np.array(places, dtype=np.int64)
        for name, places in found.items()
        if name in fits and 0 < len(name.encode()) <= LONGEST_GROUP
    }


def _not_named(stored: StoredModel, factory: str) -> RunFolderError:
    named = stored.settings.embedding
    return RunFolderError(
        "VFL-7133",
        f'the model in "{stored.path}" is made by "{named}", which is code. vafl imports it only if you name '
        f"it. Found {factory or 'no factory'}. If you trust that code, say --embedding {named}, or set "
        "model.embedding in your own configuration.",
    )


def _shared(plan: Plan | Run) -> dict[str, Any]:
    data, document = plan.data, plan.config.document()
    used = {name: document[name] for name in ("rule", "schedule")}
    return {
        "records": data.record_digest,
        "outputs": plan.task.outputs,
        "classes": list(data.classes or ()),
        "parties": [party.name for party in data.parties],
        "settings": shared_settings(plan.config)
        | used
        | {"network": {"encoding": plan.config.network.encoding}},
    }
