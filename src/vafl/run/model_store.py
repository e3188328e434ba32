"""Write trained models into run folders, and rebuild models and configurations from them."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Matrix, RowIds
from vafl.config import Config, from_document, read_document
from vafl.config.agreement import chosen_by_party, sections_of, shared_settings
from vafl.config.schema import seen_by
from vafl.data.columns import match_columns
from vafl.data.encoding import Encoder
from vafl.data.partition import Party, VerticalData
from vafl.errors import ConfigError, RunFolderError
from vafl.files import make_private_folder
from vafl.models.decisions import Decision
from vafl.models.embeddings import make_embedding
from vafl.models.heads import make_head
from vafl.models.store import SharedFacts, StoredModel, bytes_of, read_model, write_model
from vafl.names import SERVER, check_party, table_owner
from vafl.protocol.messages import EVERYTHING, LONGEST_GROUP
from vafl.protocol.rows import mean_of_rows
from vafl.protocol.secure_sum.sum_table import SumTable
from vafl.protocol.table import FOREVER, EmbeddingTable
from vafl.run.assembly import Run, widths
from vafl.run.plan import Plan, encoder_of, inputs_of
from vafl.scope import Scope

MODELS = "models"  # in a run folder: one folder for each party's model
_NEVER_FROM_THE_RUN = ("ledger",)  # a run folder may come from someone else: it chooses no new files
_PREDICTING = (
    *("party", "seed", "threads", "data", "parties", "partition"),
    *("model", "embedding", "privacy", "network", "prediction"),
)
_SHOWN = 10  # differences in one log line

log = logging.getLogger("vafl.model")


def model_folder(run: Path, party: str) -> Path:
    """Return the folder in which a run keeps this party's model.

    Raises:
        ConfigError: The name is not valid for a party. It could otherwise lead out of the run folder.
    """
    return run / MODELS / check_party(party)


def run_name(number: int) -> str:
    """Return a run's random number as the text that manifests use."""
    return f"{number:016x}"


def keep_embedding(plan: Plan | Run, index: int, path: Path, run: str) -> None:
    """Write the trained model of client `index` into the run folder `path`.

    Args:
        run: the run's name.
    """
    party = plan.data.parties[index]
    write_model(
        _make_model_folder(path, party.name),
        plan.models[index],
        party=party.name,
        kind="embedding",
        features=list(party.features.shape[1:]),
        schema={} if party.encoder is None else party.encoder.to_dict(),
        source=_source_facts(plan.config, party.name),
        embedding=_embedding_facts(plan.config, party.name),
        run=run,
        **_shared(plan),
    )


def keep_head(
    plan: Plan | Run, decision: Decision, defaults: Mapping[str, Tensor], path: Path, run: str
) -> None:
    """Write the trained head into the run folder `path`.

    Args:
        decision: how the head's outputs become probabilities and a class.
        defaults: party -> the embedding to use when that client cannot answer.
        run: the run's name.
    """
    write_model(
        _make_model_folder(path, SERVER),
        plan.head,
        defaults,
        party=SERVER,
        kind="head",
        features=[plan.config.model.head_inputs(widths(plan))],
        schema={},
        source={},
        embedding={},
        run=run,
        decision=decision,
        **_shared(plan),
    )


def _source_facts(config: Config, party: str) -> dict[str, Any]:
    """Return the settings of a source that affect the features, apart from the encoder."""
    missing = getattr(config.sources.get(table_owner(party)), "missing", None)
    return {} if missing is None else {"missing": list(missing)}


def _embedding_facts(config: Config, party: str) -> dict[str, Any]:
    """Return the settings that describe the party's network. Files and devices are those of one machine."""
    own = config.of(party).embedding
    return {"model": own.model, "hidden": list(own.hidden)}


def _make_model_folder(run: Path, party: str) -> Path:
    """Return the folder for a party's model, and create RUN/models so that only its owner can read it."""
    folder = model_folder(run, party)
    make_private_folder(folder.parent)
    return folder


def keep_all(run: Run, decision: Decision, path: Path) -> None:
    """Write all models of a simulated run.

    Its name is a digest of the trained parameters, so equal models have equal names.

    Args:
        decision: as for `keep_head`.
    """
    tensors = [tensor for module in (*run.models, run.head) for tensor in module.state_dict().values()]
    name = hashlib.sha256(b"".join(map(bytes_of, tensors))).hexdigest()[:16]
    for index in range(len(run.models)):
        keep_embedding(run, index, path, name)
    # Under a secure sum the server never sees a single client's embeddings, so it has no defaults.
    defaults = {} if run.config.privacy.secure_sum else dict(_simulated_defaults(run))
    keep_head(run, decision, defaults, path, name)


def _simulated_defaults(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield the default embedding of each client of a simulated run; see `stand_ins`."""
    held_out = np.arange(run.data.rows, run.data.parts.total)
    for party, cells in zip(run.data.parties, run.evaluator.embeddings(), strict=True):
        yield party.name, _mean(cells.numpy(), _rows_for_default(party, held_out) - run.data.rows)


def stand_ins(data: VerticalData, table: EmbeddingTable, measured: RowIds) -> dict[str, Tensor]:
    """Return the default embedding of each client, for use when the client cannot answer.

    It is the embedding that the client learnt for records it does not have. If the client has every record,
    it is the client's mean embedding. A secure sum has no defaults.

    Args:
        table: the server's table, which the embeddings are read from.
        measured: held-out rows whose embeddings come from the models that are kept. The training rows are
            used for a client with no such row in the table.
    """
    defaults = {}
    for client, party in enumerate([] if isinstance(table, SumTable) else data.parties):
        for rows in (measured, np.arange(data.rows)):
            known = rows[table.stored_at[rows, client] > -FOREVER]
            if len(known):
                defaults[party.name] = _mean(table.column(client), _rows_for_default(party, known))
                break
    return defaults


def _rows_for_default(party: Party, rows: RowIds) -> RowIds:
    """Return the rows whose mean embedding is the party's default.

    These are the rows that the party does not have: its model gives them all the same learnt embedding. If
    the party has every row, return all of them.
    """
    if party.ids is None:
        return rows
    lacked = party.ids.is_null().to_numpy()[rows]
    return rows[lacked] if lacked.any() else rows


def _mean(cells: Matrix, rows: RowIds) -> Tensor:
    return torch.from_numpy(mean_of_rows(cells, rows))


def open_model(run: Path, party: str) -> StoredModel:
    """Read a party's trained model from a run folder.

    Raises:
        RunFolderError: There is no model, or it belongs to another party.
    """
    stored = read_model(model_folder(run, party))
    stored.require({"party": party})
    return stored


def read_deployed(path: Path, overrides: Sequence[str], run: Path, party: str) -> Config:
    """Read a party's configuration file for using a trained model; see `as_trained`.

    Log a warning with the entries of the file that the model overrides.
    """
    document, stored = read_document(path, list(overrides)), open_model(run, party)
    config = as_trained(document, stored, run)
    if ignored := _overridden(document, config.document()):
        log.warning(
            '"%s" differs from the settings that the model in "%s" was trained with. Using the model\'s: %s',
            path,
            run,
            "; ".join(f"{name} is {value}" for name, value in ignored[:_SHOWN]),
        )
    return config


def as_trained(document: Mapping[str, Any], stored: StoredModel, run: Path) -> Config:
    """Return the configuration with which a party uses its trained model.

    - The manifest decides everything that affects a prediction, even if `document` differs: data, partition,
      model, privacy, encoding.
    - The document decides where files are and how the model is served: sources, device, network, prediction,
      threads.
    - Settings that each party chooses for itself, such as privacy.mu_max, come from the document if it has
      them, otherwise from RUN/config.toml.

    Args:
        document: a configuration as nested dictionaries, as `read_document` returns it. It may be
            incomplete if the training used `--set`.

    Raises:
        RunFolderError: the document asks for privacy that the model was trained without, or does not name
            the factory that builds the model.
        ConfigError: a setting that the document decides is wrong.
    """
    manifest = stored.manifest
    owner = table_owner(manifest.party)
    document, training = seen_by(dict(document), owner), seen_by(_training_document(run), owner)
    _check_factory(document, stored)
    _check_protection(document, stored)
    merged: dict[str, Any] = {name: value for name, value in document.items() if name in _PREDICTING}
    merged["seed"] = manifest.settings.get("seed", 0)
    for name in (*sections_of(Scope.MODEL), "rule", "schedule"):
        # A manifest may come from someone else. It must not choose files, budgets or addresses.
        own = chosen_by_party(name) if name in sections_of(Scope.MODEL) else ()
        kept = {key: value for key, value in manifest.settings.get(name, {}).items() if key not in own}
        chosen = {key: _entry(document, name, key) or _entry(training, name, key) for key in own}
        chosen |= {key: _entry(document, name, key) for key in _NEVER_FROM_THE_RUN if key in own}
        merged[name] = kept | {key: value for key, value in chosen.items() if value}
    if merged["privacy"].get("mode") == "none":
        # "auto" and "none" both add no noise. But only a user's explicit "none" permits unprotected uploads
        # of people who have a privacy ledger, so the manifest must not say it for the user.
        merged["privacy"]["mode"] = _entry(document, "privacy", "mode") or "auto"
    merged["embedding"] = dict(manifest.embedding)
    if device := _entry(document, "embedding", "device"):
        merged["embedding"]["device"] = device
    network, own = document.get("network", {}), _entry(document, "parties", owner)
    if isinstance(network, dict):
        encoding = _entry(manifest.settings, "network", "encoding") or "float32"
        merged["network"] = network | {"encoding": encoding}
    if manifest.source and isinstance(own, dict) and isinstance(own.get("source"), dict):
        source = {**own["source"], **manifest.source}
        merged["parties"] = {**document["parties"], owner: {"source": source}}
    return from_document(merged)


def _training_document(run: Path) -> dict[str, Any]:
    path = run / "config.toml"
    return read_document(path) if path.is_file() else {}


def _entry(document: Mapping[str, Any], section: str, key: str) -> Any:
    """Return an entry of a section; None if the document does not have it, or has "auto"."""
    entries = document.get(section, {})
    value = entries.get(key) if isinstance(entries, dict) else None
    return None if value == "auto" else value


def _check_factory(document: Mapping[str, Any], stored: StoredModel) -> None:
    """Raise RunFolderError if the model needs a factory that the document does not name."""
    named = str(_entry(document, "embedding", "model") or "")
    if stored.has_factory and stored.embedding is not None and named != stored.embedding.model:
        raise _not_named(stored, named)


def _check_protection(document: Mapping[str, Any], stored: StoredModel) -> None:
    """Raise RunFolderError if the document asks for privacy that the model was trained without."""
    trained = stored.manifest.settings.get("privacy", {})
    for key in ("mode", "noise", "secure_sum"):
        asked, had = _entry(document, "privacy", key), trained.get(key)
        if asked and asked != "none" and had in (None, "none", 0, False):
            raise RunFolderError(
                "VFL-7131",
                f'a model keeps the privacy settings of its training. The model in "{stored.path}" was '
                f"trained with privacy.{key} = {had}. Found {asked} in the configuration. Train again with "
                f"{asked}, or remove privacy.{key}.",
            )


def _overridden(document: Mapping[str, Any], used: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (dotted name, value in use) for each entry of the document that the model overrides."""
    overridden = []
    for name, entries in document.items():
        if name not in _PREDICTING:
            continue
        pairs = entries.items() if isinstance(entries, dict) else [("", entries)]
        for key, value in pairs:
            now = used[name].get(key) if key else used[name]
            if not isinstance(value, dict) and value not in (now, "auto"):
                overridden.append((f"{name}.{key}" if key else name, now))
    return overridden


def rebuild(stored: StoredModel, factory: str = "") -> nn.Module:
    """Return the trained module, in evaluation mode.

    A model folder cannot make vafl import code. If the model comes from a `package.module:Factory`, vafl
    imports that factory only if the user names it too.

    Args:
        factory: embedding.model of the user's own configuration, or the name given on the command line.

    Raises:
        RunFolderError: The folder names a factory that the user does not, or its entries are inconsistent.
    """
    settings, manifest, own = stored.settings, stored.manifest, stored.embedding
    encoder = None if own is None else encoder_of(stored)
    if own is not None:
        if own.has_factory and own.model != factory:
            raise _not_named(stored, factory)
        embedding = partial(
            make_embedding,
            own,
            manifest.features,
            manifest.widths[manifest.parties.index(manifest.party)],
            inputs_of(encoder),
            record_shape=None if encoder is None else encoder.record_shape,
        )
    if own is not None and own.has_factory:
        module = embedding()
    else:
        try:
            # The sizes come from a manifest that may be wrong or hostile. The meta device allocates no
            # memory; `load_into` then checks the sizes against the parameters in the file.
            with torch.device("meta"):
                module = (
                    make_head(settings, manifest.widths, manifest.outputs) if own is None else embedding()
                )
        except (ConfigError, RuntimeError) as error:
            raise RunFolderError(
                "VFL-7132",
                f'the manifest in "{stored.path}" must describe a model. Restore it, or train again. '
                f"Found: {error}",
            ) from error
    stored.load_into(module)
    return module.eval()


def feature_groups(
    stored: StoredModel, groups: Mapping[str, tuple[str, ...]], *, each: bool
) -> dict[str, RowIds]:
    """Return the feature indices of each group of columns whose importance can be measured, by group name.

    Columns of a table keep their names. The numbers of a vector are called "feature 1" and so on. Images and
    series have no groups. A group whose name does not fit into a message is left out.

    Args:
        groups: name -> columns, by name or pattern.
        each: whether to add a group for every single column.

    Raises:
        DataError: a group names a column that the model does not use.
    """
    encoder = encoder_of(stored)
    columns: dict[str, list[int]] = {}
    if isinstance(encoder, Encoder):
        first = 0
        for column in encoder.columns:
            last = first + len(column.names(encoder.form))
            columns[column.name] = list(range(first, last))
            first = last
    else:
        # Without the mark of absent records, which follows the numbers of a vector.
        shape = stored.manifest.features if encoder is None else encoder.record_shape
        if len(shape) == 1:
            columns = {f"feature {number + 1}": [number] for number in range(shape[0])}
    names = list(columns)
    setting = f"parties.{stored.manifest.party}.source.groups"
    indices = {}
    for name, patterns in groups.items():
        chosen = match_columns(names, {name: patterns}, setting)[name]
        indices[name] = [place for number in chosen for place in columns[names[number]]]
    if each:
        indices = columns | indices
    fits = {name for name in indices if name.isprintable() and name != EVERYTHING}
    return {
        name: np.array(places, dtype=np.int64)
        for name, places in indices.items()
        if name in fits and 0 < len(name.encode()) <= LONGEST_GROUP
    }


def _not_named(stored: StoredModel, factory: str) -> RunFolderError:
    named = "" if stored.embedding is None else stored.embedding.model
    return RunFolderError(
        "VFL-7133",
        f'vafl imports the code that builds a model only if you name it. The model in "{stored.path}" is '
        f'built by "{named}". Found {factory or "no factory"}. If you trust that code, add --embedding '
        f"{named}, or set embedding.model in your configuration.",
    )


def _shared(plan: Plan | Run) -> SharedFacts:
    data, document = plan.data, plan.config.document()
    used = {name: document[name] for name in ("rule", "schedule")}
    return {
        "records": data.record_digest,
        "outputs": plan.task.outputs,
        "classes": list(data.classes or ()),
        "parties": [party.name for party in data.parties],
        "widths": widths(plan),
        "settings": shared_settings(plan.config)
        | used
        | {"network": {"encoding": plan.config.network.encoding}},
    }
