"""The plan of a run, which every party derives from the configuration: data, task and initial models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Floats
from vafl.config import Config
from vafl.data.aligned import load_tables
from vafl.data.encoding import Encoder, Form, NumberColumn
from vafl.data.one_file import deal
from vafl.data.partition import VerticalData, partition
from vafl.data.public import load
from vafl.data.settings import LABEL_HOLDER, DataSettings
from vafl.data.source_settings import SourceSettings
from vafl.data.sources.base import RecordEncoder, encoder_from_dict
from vafl.data.split import Split
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.files import return_freed_memory
from vafl.models.devices import on_device
from vafl.models.embeddings import make_embedding
from vafl.models.heads import make_head
from vafl.models.losses import LOSSES, Loss, squared_in_unit
from vafl.models.metrics import Figures, Metrics
from vafl.models.pretrained import prepared
from vafl.models.probabilities import Calibration
from vafl.models.store import StoredModel
from vafl.models.tabular import CategoryInput, HeadInUnit, Input, NumberInput
from vafl.models.weights import check_class_weight, class_weights, row_weights
from vafl.privacy.settings import GUARANTEED
from vafl.protocol.rules import Rule

_MODEL_STREAMS = 3_000_017  # distance between the seeds of two parties' initial models


@dataclass(frozen=True)
class Task:
    """The prediction task that the labels imply: number of outputs, loss and metrics."""

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
    """The plan of one run.

    In a simulation it holds the data and models of all parties. In a federation it holds one party's data and
    model, and only the names of the others.

    Attributes:
        from_earlier_run: the run whose models this one starts from, as in `RunTerms`; empty if none.
    """

    config: Config
    data: VerticalData
    task: Task
    models: list[nn.Module]
    head: nn.Module
    from_earlier_run: str = ""

    @property
    def loss(self) -> Loss:
        """The loss that training minimises."""
        if self.task.loss == "squared" and isinstance(self.head, HeadInUnit):
            return squared_in_unit(float(self.head.unit))
        return LOSSES[self.task.loss]

    @property
    def weights(self) -> Floats | None:
        """The weight of each training row in the loss, [rows], with mean 1; None if all weights are equal."""
        data = self.data
        given_weights = None if data.weights is None else data.weights[data.train]
        return row_weights(
            self.config.model.class_weight, data.labels[data.train], data.classes, given_weights
        )

    @property
    def undo(self) -> Calibration:
        """A calibration that reverses the effect of class weights on outputs.

        Evaluations use it because their metrics are not weighted.
        """
        if self.task.loss == "squared":
            return Calibration()
        return Calibration.undoing(loss_weights(self.config, self.data), self.task.outputs)


def loss_weights(config: Config, data: VerticalData) -> list[float]:
    """Return the weight of each class in the training loss, computed from the training labels."""
    train_labels = data.labels[data.train].numpy()
    weights: list[float] = class_weights(config.model.class_weight, train_labels, data.classes or ()).tolist()
    return weights


class Beginning(Protocol):
    """What a run starts with, if not with new models and encoders.

    Attributes:
        from_earlier_run: as in `Plan`.
    """

    @property
    def from_earlier_run(self) -> str: ...

    def encoder(self, party: str) -> RecordEncoder | None:
        """Return the encoder of a party's earlier model; None to fit a new one."""

    def carry_over(self, plan: Plan, party: str | None) -> None:
        """Copy earlier models into those of the plan, as far as this process, of `party`, has them."""


def make_plan(
    config: Config,
    data: VerticalData | None = None,
    party: str | None = None,
    beginning: Beginning | None = None,
) -> Plan:
    """Load the data, check the configuration against it and create the initial models.

    Args:
        data: used instead of loading the [data] section of the configuration.
        party: with parties' own data, read only this party's: the server reads the labels, a client its
            features. The models of the other parties are then empty. None reads all data, for a simulation.
        beginning: what the run starts with; None starts with new models and encoders.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used. Nothing has been trained or
            written.
    """
    if data is None:
        data = load_data(config, party, beginning)
    config = sized(config, data.rows, len(data.parties))
    config.schedule.check_rows(data.rows)
    config.rule.check_clients(len(data.parties))
    config.delays.check_clients(len(data.parties))
    config.privacy.check_clients(len(data.parties))
    config.labels.check_classes(len(data.classes or ()))
    check_class_weight(config.model.class_weight, data.classes)
    task = Task.of(config, data)
    if party in (None, LABEL_HOLDER):  # other parties have no labels
        _check_measurable(config, task.metrics, data)
        _check_decidable(config, task, data)
    if config.privacy.kind == "frozen" and config.model.head == "bias":
        raise ConfigError(
            "VFL-7151",
            'privacy.mode "frozen" trains only the head, so the head needs weights. Found model.head = '
            '"bias", which has one number per output. Use model.head = "linear" or "mlp".',
        )
    if task.loss != "softmax":
        data = replace(data, labels=data.labels.float())
    models, head = _models(config, data, task)
    if task.loss == "squared" and isinstance(head, HeadInUnit) and party in (None, LABEL_HOLDER):
        head.measure(data.labels[data.train])
    if beginning is None:
        return Plan(config, data, task, models, head)
    plan = Plan(config, data, task, models, head, beginning.from_earlier_run)
    beginning.carry_over(plan, party)
    return plan


def sized(config: Config, rows: int, clients: int) -> Config:
    """Return the configuration with the settings that depend on the number of training rows filled in.

    Every party computes this separately and gets the same result.
    """
    schedule = config.schedule.sized(rows)
    uploads_per_update = (
        clients if config.rule.name == "centralised" else Rule.of(config.rule, clients).quorum
    )
    # Updates until every client has uploaded each of its rows once.
    epoch = math.ceil(rows / schedule.batch_size) * clients / uploads_per_update
    updates = config.stop.updates or math.ceil(schedule.epochs * epoch)
    every = config.evaluation.every or max(1, min(math.ceil(epoch), updates))
    parties = {
        name: own if own.optimiser is None else replace(own, optimiser=own.optimiser.planned(updates))
        for name, own in config.parties.items()
    }
    return replace(
        config,
        parties=parties,
        schedule=schedule,
        optimiser=config.optimiser.planned(updates),
        stop=replace(config.stop, updates=updates),
        evaluation=replace(config.evaluation, every=every),
    )


def _check_measurable(config: Config, metrics: Metrics, data: VerticalData) -> None:
    """Check that the headline metric, and the metrics that stop or select, are defined on their rows.

    Other metrics may be undefined, such as the AUC if all validation rows have one class. They are then None.

    Raises:
        DataError: one of the checked metrics is not defined.
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
                "VFL-7152",
                f"{setting} needs labels of two different values to measure {metric.name}. Found one value "
                f"in the {len(labels):,} {part} rows. Hold out more rows (data.{part}_fraction), or set "
                f'{"stop.select" if setting == "stop.select" else "model.metric"} = "loss".',
            )


def _check_decidable(config: Config, task: Task, data: VerticalData) -> None:
    """Check that the validation rows allow the configured calibration and decision threshold.

    Raises:
        ConfigError: the validation rows are missing or have one class only.
    """
    classes = 0 if task.loss == "squared" else len(data.classes or ())
    several = len(np.unique(data.labels[data.validation])) > 1
    config.model.check_calibration(classes, several=several)
    config.decision.check_rows(classes, both=several)


def held_out_labels(data: VerticalData) -> dict[str, Tensor]:
    """Return the labels of the held-out rows by part: "validation", then "test".

    A part without rows is omitted, so the first part is the one that evaluations use.
    """
    parts = {"validation": data.labels[data.validation], "test": data.labels[data.test]}
    return {name: labels for name, labels in parts.items() if len(labels)}


def baselines(task: Task, data: VerticalData) -> dict[str, dict[str, Figures]]:
    """Return the metrics of the baselines: baseline -> part of the held-out rows -> metric -> value."""
    train_labels, parts = data.labels[data.train], held_out_labels(data)
    trivial = {part: task.metrics.trivial(train_labels, labels) for part, labels in parts.items()}
    return {"trivial": trivial}


def a_party(config: Config) -> str | None:
    """Return a party that this configuration describes; None if it describes all parties."""
    everyone = {LABEL_HOLDER, *config.data.parties}
    if config.party:
        return config.party
    return next(iter(config.sources)) if config.sources and everyone - set(config.sources) else None


def load_data(config: Config, party: str | None = None, beginning: Beginning | None = None) -> VerticalData:
    """Load the data that a party can read; `party` None loads the data of all parties.

    Raises:
        ConfigError, DataError: the data are missing, damaged or not allowed by the privacy mode.
    """
    if config.data.is_tabular:
        check_public(config, is_table=True)
        settings, tables = tables_of(config)
        private = config.privacy.kind in GUARANTEED
        forms = partial(form_for, config)
        known = (lambda name: None) if beginning is None else beginning.encoder
        data = load_tables(settings, tables, config.seed, party, form=forms, public=private, known=known)
        return_freed_memory()
        return data
    if tabular := [name for name in ("", *config.parties) if config.of(name).embedding.model == "tabular"]:
        raise ConfigError(
            "VFL-7153",
            'embedding.model = "tabular" needs data.name = "csv" or "parties". Found data.name = '
            f'"{config.data.name}"{" at " if tabular[0] else ""}{tabular[0]}. Use embedding.model = "linear" '
            'or "mlp".',
        )
    loaded = load(config.data)
    check_public(config, is_table=loaded.is_table, fitted=loaded.fitted)
    split = Split.of_dataset(loaded, config.data, config.seed)
    return partition(loaded, split, config.partition, config.data.scale)


def tables_of(config: Config, *, labelled: bool = True) -> tuple[DataSettings, Mapping[str, SourceSettings]]:
    """Return the data settings with all client names, and the source settings of every party.

    Each party has its own file, or columns of one shared CSV file.

    Args:
        labelled: whether a shared file must have the label column.
    """
    if config.data.name == "csv":
        return deal(config.data, config.partition, labelled=labelled)
    return config.data, config.sources


def check_public(config: Config, *, is_table: bool, fitted: bool = False) -> None:
    """Check that a privacy mode with a guarantee uses no features that depend on other records.

    Such statistics (a mean, a clipping quantile) would leak information about every record, and the noise
    does not cover that.

    Raises:
        ConfigError: a feature depends on statistics of the records.
    """
    if config.privacy.kind not in GUARANTEED:
        return
    if fitted:
        raise ConfigError(
            "VFL-7154",
            f"privacy.mode {config.privacy.kind} needs features that do not depend on other records. Found "
            f"data.name = {config.data.name}, which is clipped or filled by statistics of all training "
            'records. Prepare the data with public constants and use data.name = "csv" or "parties", or '
            "choose a mode without a guarantee: embed_only or none.",
        )
    if config.data.scale == "standard" or (config.data.scale == "auto" and is_table):
        raise ConfigError(
            "VFL-7155",
            f"privacy.mode {config.privacy.kind} needs features that do not depend on other records. Found "
            f'data.scale = "{config.data.scale}", which scales by statistics of all records. Scale the '
            'columns by public constants beforehand, and set data.scale = "none".',
        )


def _models(config: Config, data: VerticalData, task: Task) -> tuple[list[nn.Module], nn.Module]:
    """Create the initial models from the run's seed, without changing torch's global generator.

    With parties' own data, each party seeds its model separately. A party cannot build the models of the
    others, so a shared random stream would be at a different position at every party.
    """
    seeds_separately = config.data.is_tabular
    names = [party.name for party in data.parties]
    unknown = [name for name in config.parties if name not in (LABEL_HOLDER, *names)]
    if unknown and config.data.name != "parties":  # there, Config knows the names
        raise ConfigError(
            "VFL-7158",
            f"[parties.NAME] must name parties of this run: {', '.join(names)}. Found {', '.join(unknown)}.",
        )
    widths = config.model.widths(names, task.outputs)
    models: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        for index, party in enumerate(data.parties):
            if seeds_separately:
                torch.manual_seed(config.seed + (index + 1) * _MODEL_STREAMS)
            if not party.features.numel():
                models.append(nn.Identity())
                continue
            shape = party.features.shape[1:]
            models.append(first_model(config, party.name, shape, party.encoder, widths[index]))
        if seeds_separately:
            torch.manual_seed(config.seed)
        return models, make_head(config.model, widths, task.outputs)


def first_model(
    config: Config, party: str, shape: Sequence[int], encoder: RecordEncoder | None, width: int
) -> nn.Module:
    """Create one party's initial model, with its pretrained weights and frozen layers, on its device.

    Args:
        shape: the shape of one record's features.
        width: the width of the embedding.

    Raises:
        ConfigError: the network, the weights or the device do not fit.
    """
    settings = config.of(party).embedding
    record_shape = None if encoder is None else encoder.record_shape
    model = make_embedding(settings, shape, width, inputs_of(encoder), record_shape=record_shape)
    adds_noise = config.of(party).privacy.protection.noises_anything
    return on_device(prepared(model, settings), settings, adds_noise=adds_noise)


def form_for(config: Config, party: str) -> Form:
    """Return the form of features that the party's embedding takes, if its source is a table."""
    chosen, private = config.of(party).embedding.model, config.privacy.protection.guaranteed
    return "codes" if chosen == "tabular" or (chosen == "auto" and not private) else "dense"


def inputs_of(encoder: RecordEncoder | None) -> list[Input]:
    """Return the description of each encoded column that a tabular embedding needs; empty if dense."""
    if not isinstance(encoder, Encoder) or encoder.form == "dense":
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


def encoder_of(stored: StoredModel) -> RecordEncoder | None:
    """Return the encoder from the party's records to the model's features; None if there is none.

    Raises:
        RunFolderError: The manifest's schema is damaged, or its features do not match the model's.
    """
    if not stored.manifest.schema:
        return None
    try:
        encoder = encoder_from_dict(stored.manifest.schema)
    except DataError as error:
        raise RunFolderError(
            "VFL-7156",
            f'the manifest in "{stored.path}" must hold the schema of an encoder. Restore it, or train '
            f"again. Found: {error}",
        ) from error
    stored.require({"features": list(encoder.shape)})
    return encoder
