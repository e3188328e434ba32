"""What every party of a run works out for itself from the configuration: data, task, first models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vafl.config import Config
from vafl.data.aligned import load_tables
from vafl.data.encoding import Encoder, Form, NumberColumn
from vafl.data.one_file import deal
from vafl.data.partition import VerticalData, partition
from vafl.data.settings import LABEL_HOLDER, DataSettings, TableSettings
from vafl.data.sources import load
from vafl.data.split import Split
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.files import return_freed_memory
from vafl.models.embeddings import make_embedding
from vafl.models.folder import StoredModel
from vafl.models.heads import make_head
from vafl.models.losses import LOSSES, Loss, squared_in_unit
from vafl.models.metrics import Figures, Metrics
from vafl.models.probabilities import Calibration
from vafl.models.tabular import CategoryInput, Input, NumberInput, TabularHead
from vafl.models.weights import check_class_weight, class_weights, row_weights
from vafl.privacy.settings import GUARANTEED
from vafl.protocol.rules import Rule

_MODEL_STREAMS = 3_000_017


@dataclass(frozen=True)
class Task:
    """What the labels make of the run: how many outputs, which loss, which metrics."""

    outputs: int
    loss: str
    metrics: Metrics

    @classmethod
    def of(cls, config: Config, data: VerticalData) -> "Task":
        classes = 0 if data.classes is None else len(data.classes)
        loss = config.model.loss_for(classes)
        outputs = config.model.outputs_for(classes)
        return cls(outputs, loss, Metrics.of(loss, outputs, config.model.metric, config.stop.select))


@dataclass(frozen=True)
class Plan:
    """Of one run: all of it in a simulation, a party's own part and the others' names elsewhere."""

    config: Config
    data: VerticalData
    task: Task
    models: list[nn.Module]
    head: nn.Module

    @property
    def loss(self) -> Loss:
        """What the training minimises."""
        if self.task.loss == "squared" and isinstance(self.head, TabularHead):
            return squared_in_unit(float(self.head.unit))
        return LOSSES[self.task.loss]

    @property
    def weights(self) -> npt.NDArray[np.float32] | None:
        """How much each training row counts in the loss, [rows], with mean 1; None if all count the same."""
        data = self.data
        own = None if data.weights is None else data.weights[data.train]
        return row_weights(self.config.model.class_weight, data.labels[data.train], data.classes, own)

    @property
    def undo(self) -> Calibration:
        """Undoes the effect of class weights on outputs, for evaluations: they are not weighted."""
        if self.task.loss == "squared":
            return Calibration()
        return Calibration.undoing(loss_weights(self.config, self.data), self.task.outputs)


def loss_weights(config: Config, data: VerticalData) -> list[float]:
    """Return the weight of each class in the training loss, by the labels that the run trains on."""
    known = data.labels[data.train].numpy()
    weights: list[float] = class_weights(config.model.class_weight, known, data.classes or ()).tolist()
    return weights


def make_plan(config: Config, data: VerticalData | None = None, party: str | None = None) -> Plan:
    """Loads and checks. `data` replaces what the config's data section would load.

    Of tables, a party reads its own only: the server's process the labels, a client's its features. The
    models of the others are then empty. None reads all, for a simulation.

    Raises:
        ConfigError, DataError: before anything was trained or written.
    """
    if data is None:
        data = load_data(config, party)
    config = sized(config, data.rows, len(data.parties))
    config.schedule.check_rows(data.rows)
    config.rule.check_clients(len(data.parties))
    config.delays.check_clients(len(data.parties))
    config.privacy.check_clients(len(data.parties))
    config.labels.check_classes(len(data.classes or ()))
    check_class_weight(config.model.class_weight, data.classes)
    task = Task.of(config, data)
    if party in (None, LABEL_HOLDER):  # the others have no labels
        _check_measurable(config, task.metrics, data)
        _check_decidable(config, task, data)
    if config.privacy.kind == "frozen" and config.model.head == "bias":
        raise ConfigError(
            'privacy.mode "frozen" trains the head alone, and model.head = "bias" has next to nothing to '
            'train. Use model.head = "linear" or "mlp".'
        )
    if task.loss != "softmax":
        data = replace(data, labels=data.labels.float())
    models, head = _models(config, data, task)
    if task.loss == "squared" and isinstance(head, TabularHead) and party in (None, LABEL_HOLDER):
        head.measure(data.labels[data.train])
    return Plan(config, data, task, models, head)


def sized(config: Config, rows: int, clients: int) -> Config:
    """Return the configuration with everything that depends on the number of training rows.

    Every party works this out for itself, and finds the same.
    """
    schedule = config.schedule.sized(rows)
    together = clients if config.rule.name == "centralised" else Rule.of(config.rule, clients).quorum
    epoch = math.ceil(rows / schedule.batch_size) * clients / together
    updates = config.stop.updates or math.ceil(schedule.epochs * epoch)
    every = config.evaluation.every or max(1, min(math.ceil(epoch), updates))
    return replace(
        config,
        schedule=schedule,
        optimiser=config.optimiser.planned(updates),
        stop=replace(config.stop, updates=updates),
        evaluation=replace(config.evaluation, every=every),
    )


def _check_measurable(config: Config, metrics: Metrics, data: VerticalData) -> None:
    """Check that the metrics which decide something are defined on the rows they are measured on.

    Any other metric may be undefined, such as the AUC of validation rows of one class: it is then None.

    Raises:
        DataError: one is not.
    """
    parts, watched = held_out_labels(data), data.parts.watched
    decisive = [("test", "model.metric", metrics.headline)]
    if config.stop.metric is not None:
        decisive.append((watched, "stop.metric, a target for model.metric", metrics.headline))
    if config.stop.patience:
        decisive.append((watched, "stop.select", metrics.select))
    for part, setting, metric in decisive:
        labels = parts.get(part)
        if labels is not None and not metric.is_defined_on(labels):
            raise DataError(
                f"{setting} needs labels of two different values to measure {metric.name}. Found one value "
                f"in the {len(labels):,} {part} rows. Hold out more rows (data.{part}_fraction), or set "
                f'{"stop.select" if setting == "stop.select" else "model.metric"} = "loss".'
            )


def _check_decidable(config: Config, task: Task, data: VerticalData) -> None:
    """Check that the validation rows allow the calibration and the threshold that are asked for.

    Raises:
        ConfigError: they do not.
    """
    classes = 0 if task.loss == "squared" else len(data.classes or ())
    several = len(np.unique(data.labels[data.validation])) > 1
    config.model.check_calibration(classes, several=several)
    config.decision.check_rows(classes, both=several)


def held_out_labels(data: VerticalData) -> dict[str, Tensor]:
    """Return the labels of the held-out rows by part, the one that evaluations use first.

    The parts are "validation" and "test". Either is left out if it has no rows.
    """
    parts = {"validation": data.labels[data.validation], "test": data.labels[data.test]}
    return {name: labels for name, labels in parts.items() if len(labels)}


def baselines(task: Task, data: VerticalData) -> dict[str, dict[str, Figures]]:
    """Return what a run has to beat: baseline -> part of the held-out rows -> metric -> value."""
    known, parts = data.labels[data.train], held_out_labels(data)
    trivial = {part: task.metrics.trivial(known, labels) for part, labels in parts.items()}
    return {"trivial": trivial}


def a_party(config: Config) -> str | None:
    """Whose view of the data this configuration allows; None where it has everybody's."""
    everyone = {LABEL_HOLDER, *config.data.parties}
    return next(iter(config.tables)) if config.tables and everyone - set(config.tables) else None


def load_data(config: Config, party: str | None = None) -> VerticalData:
    """What a party knows of the data; None: all of it."""
    if config.data.is_tabular:
        _check_public(config, is_table=True)
        settings, tables = tables_of(config)
        private = config.privacy.kind in GUARANTEED
        loaded_tables = load_tables(
            settings, tables, config.seed, party, form=form_for(config), public=private
        )
        return_freed_memory()
        return loaded_tables
    if config.model.embedding == "tabular":
        raise ConfigError(
            'model.embedding = "tabular" is for data.name = "csv" or "tables". Found data.name = '
            f'"{config.data.name}". Use "linear" or "mlp".'
        )
    loaded = load(config.data)
    _check_public(config, is_table=loaded.is_table, fitted=loaded.fitted)
    split = Split.of_dataset(loaded, config.data, config.seed)
    return partition(loaded, split, config.partition, config.data.scale)


def tables_of(config: Config, *, labelled: bool = True) -> tuple[DataSettings, Mapping[str, TableSettings]]:
    """Return the data settings with all clients' names, and the tables of the parties: one file each, or
    columns of one file.

    Args:
        labelled: whether a single file must have the label column.
    """
    if config.data.name == "csv":
        return deal(config.data, config.partition, labelled=labelled)
    return config.data, config.tables


def _check_public(config: Config, *, is_table: bool, fitted: bool = False) -> None:
    """Statistics of all records in every feature would carry each record past the noise."""
    if config.privacy.kind not in GUARANTEED:
        return
    if fitted:
        raise ConfigError(
            f"privacy.mode {config.privacy.kind} guarantees each record something, but {config.data.name} is "
            "clipped or filled by statistics of all its training records. Prepare the data by public "
            'constants, as data.name = "csv" or "tables", or use a mode that promises nothing, embed_only or '
            "none."
        )
    if config.data.scale == "standard" or (config.data.scale == "auto" and is_table):
        raise ConfigError(
            f"privacy.mode {config.privacy.kind} guarantees each record something, but data.scale = "
            f'"{config.data.scale}" makes every feature depend on all records. Scale the columns by public '
            'constants beforehand, and set data.scale = "none".'
        )


def _models(config: Config, data: VerticalData, task: Task) -> tuple[list[nn.Module], nn.Module]:
    """Initial parameters come from the run's seed, and torch's global generator is left as it was.

    Parties that know their own table only draw from streams of their own, whatever the others' shapes.
    """
    alone = config.data.is_tabular
    models: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        for index, party in enumerate(data.parties):
            if alone:
                torch.manual_seed(config.seed + (index + 1) * _MODEL_STREAMS)
            known = party.features.numel() > 0
            models.append(
                make_embedding(config.model, party.features.shape[1:], task.outputs, inputs_of(party.encoder))
                if known
                else nn.Identity()
            )
        if alone:
            torch.manual_seed(config.seed)
        return models, make_head(config.model, len(models), task.outputs)


def form_for(config: Config) -> Form:
    """The form of features that the configured embedding takes."""
    return "codes" if config.model.embedding == "tabular" else "dense"


def inputs_of(encoder: Encoder | None) -> list[Input]:
    """What a tabular embedding must know of each code that the encoder makes; nothing of dense features."""
    if encoder is None or encoder.form == "dense":
        return []
    inputs: list[Input] = []
    for part in encoder.parts:
        if isinstance(part, NumberColumn):
            values = part.scaled(np.array(part.edges)).tolist()
            fill = part.scaled(np.array([part.centre])).item()
            inputs.append(NumberInput(tuple(values), fill, part.flags_missing))
        else:
            inputs.append(CategoryInput(part.levels))
    return [*inputs, *([CategoryInput(2)] if encoder.flags_absent else [])]


def encoder_of(stored: StoredModel) -> Encoder | None:
    """Return how the party's raw columns become the model's features; None if it takes features as they are.

    Raises:
        RunFolderError: The manifest's schema is not an encoder's, or gives other features.
    """
    if not stored.manifest.schema:
        return None
    try:
        encoder = Encoder.from_dict(stored.manifest.schema)
    except DataError as error:
        raise RunFolderError(f'the schema in "{stored.path}" is damaged: {error}') from error
    stored.require({"features": [len(encoder.names)]})
    return encoder
