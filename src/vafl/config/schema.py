"""The configuration of a run: one TOML file. Each section is a frozen dataclass in the package that uses it.

Reading is strict. An unknown key is an error with a suggestion, a wrong type is an error that names the
expected type, and each section checks its values when it is created.
"""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from vafl.config.run_settings import EvaluationSettings, PredictionSettings, StopSettings
from vafl.conversion import make
from vafl.data.settings import LABEL_HOLDER, DataSettings, PartitionSettings, TableSettings
from vafl.errors import ConfigError
from vafl.models.decisions import DecisionSettings
from vafl.models.settings import ModelSettings
from vafl.privacy.settings import LabelSettings, PrivacySettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import OptimiserSettings, RuleSettings
from vafl.scope import Scope, declarations, section, setting
from vafl.simulation.delays import DelaySettings
from vafl.transport.settings import NetworkSettings

_LARGEST_SEED = 2**53  # random streams count up from it, and JSON readers lose the digits of larger integers
# The defaults for tables: chosen on six public tables, judged on five others (python -m experiments.tables).
TABLE_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"test_fraction": 0.2, "validation_fraction": 0.1},
    "model": {"embedding": "tabular", "head": "tabular", "combine": "concat"},
    "schedule": {"batch_size": 0},
    "optimiser": {
        "name": "AdamW",
        "step_size": 0.002,
        "schedule": "cosine",
        "options": {"betas": [0.9, 0.95], "weight_decay": 0.01},
        "average": True,
    },
    "stop": {"updates": 0, "patience": 12},
    "evaluation": {"every": 0},
}


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Attributes:
        seed: determines initial models, batches, test rows and delays, but never the privacy noise.
        threads: the number of threads that torch and numpy use. Small models are fastest with one.
        tables: party name -> its table, for data.name = "tables". A party's file needs only its own table.
    """

    seed: int = setting(0, scope=Scope.MODEL)
    threads: int = setting(1, scope=Scope.PARTY)
    data: DataSettings = section(DataSettings, Scope.MODEL)
    tables: dict[str, TableSettings] = field(default_factory=dict)
    partition: PartitionSettings = section(PartitionSettings, Scope.MODEL)
    model: ModelSettings = section(ModelSettings, Scope.MODEL)
    decision: DecisionSettings = section(DecisionSettings, Scope.SERVER)
    rule: RuleSettings = section(RuleSettings, Scope.TRAINING, may_change=True)
    schedule: ScheduleSettings = section(ScheduleSettings, Scope.TRAINING)
    optimiser: OptimiserSettings = section(OptimiserSettings, Scope.TRAINING, may_change=True)
    privacy: PrivacySettings = section(PrivacySettings, Scope.MODEL)
    labels: LabelSettings = section(LabelSettings, Scope.SERVER)
    delays: DelaySettings = section(DelaySettings, Scope.PARTY)
    network: NetworkSettings = section(NetworkSettings, Scope.PARTY)
    stop: StopSettings = section(StopSettings, Scope.SERVER, may_change=True)
    evaluation: EvaluationSettings = section(EvaluationSettings, Scope.SERVER)
    prediction: PredictionSettings = section(PredictionSettings, Scope.PARTY)

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError("VFL-1011", f"seed must be 0 or more, and at most 2^53. Found {self.seed}.")
        if self.threads < 1:
            raise ConfigError("VFL-1012", f"threads must be 1 or more. Found {self.threads}.")
        if self.stop.patience and not self.data.validation_fraction:
            raise ConfigError(
                "VFL-1013",
                "stop.patience needs data.validation_fraction above 0: if the test rows decide when the run "
                "ends, they no longer measure how it does on new rows. Found 0.",
            )
        if self.rule.name == "sync" and self.schedule.seed == "private":
            raise ConfigError(
                "VFL-1014",
                'schedule.seed = "private" hides a client\'s batches from the others, but rule.name = "sync" '
                'needs the same batches at all clients. Set schedule.seed = "shared", or another rule.',
            )
        if self.tables:
            self._check_tables()
        self._check_weights()
        if self.privacy.secure_sum:
            self._check_secure_sum()

    def _check_tables(self) -> None:
        known = (LABEL_HOLDER, *self.data.parties)
        for name, table in self.tables.items():
            if not (table.path and table.id):
                raise ConfigError(
                    "VFL-1015",
                    f"[tables.{name}] needs path (the file) and id (the column that identifies the record). "
                    f'Found path "{table.path}", id "{table.id}".',
                )
            if name not in known:
                raise ConfigError(
                    "VFL-1016",
                    f'[tables.{name}] is no party of this run. Its parties: {", ".join(known)}. Add "{name}" '
                    "to data.parties, or remove the section.",
                )
            if table.label and name != LABEL_HOLDER:
                raise ConfigError(
                    "VFL-1017",
                    f"only the server has labels: [tables.{LABEL_HOLDER}] names their column. "
                    f'Found label = "{table.label}" in [tables.{name}]. Remove it there.',
                )
            if table.weight and name != LABEL_HOLDER:
                raise ConfigError(
                    "VFL-1018",
                    f"only the server has weights of records: [tables.{LABEL_HOLDER}] names their column. "
                    f'Found weight = "{table.weight}" in [tables.{name}]. Remove it there.',
                )

    def _check_weights(self) -> None:
        """Refuse record weights if labels are protected.

        A weight scales the gradient of its record. If it depends on the record's true label, it reveals what
        randomised response hides.
        """
        column = self.tables[LABEL_HOLDER].weight if LABEL_HOLDER in self.tables else self.data.weight
        if column and self.labels.epsilon:
            raise ConfigError(
                "VFL-1019",
                "labels.epsilon limits what gradients reveal about a record's label, but a weight scales "
                f'them by a value that may depend on the label. Found the weight column "{column}". Leave it '
                "out, or use model.class_weight, which is computed from the randomised labels.",
            )

    def _check_secure_sum(self) -> None:
        """Refuse settings under which masks would not cancel, or a sum would reveal one client's scores."""
        model, rule, network = self.model, self.rule, self.network
        asynchronous = "asynchronous release would reveal differences between a client's embeddings"
        fresh = "every round sums the current scores of its rows"
        alone = "if only one client has a record, the sum is that client's score plus constants"
        needs = (
            ("data.records", self.data.records, "common", alone),
            ("rule.name", rule.name, "sync", asynchronous),
            ("rule.order", rule.order, "upload-first", "a round is summed and answered at once"),
            ("rule.start", rule.start, "zeros", fresh),
            ("rule.delay_bound", rule.delay_bound, 0, fresh),
            ("schedule.refresh", self.schedule.refresh, "none", fresh),
            ("model.embedding", model.embedding, "linear", "only scores of linear models can be summed"),
            ("model.head", model.head, "bias", "other heads need more than the sum of the scores"),
            ("network.encoding", network.encoding, "float32", "masked scores cannot be rounded"),
            ("network.largest_norm", network.largest_norm, 0.0, "the server cannot measure masked scores"),
        )
        for name, found, needed, why in needs:
            if found != needed:
                value = f'"{needed}"' if isinstance(needed, str) else needed
                raise ConfigError(
                    "VFL-1020",
                    f"privacy.secure_sum needs {name} = {value}: {why}. Found {found!r}. Set {name} to "
                    f"{value}, or leave privacy.secure_sum out.",
                )

    def to_toml(self) -> str:
        """Return the whole configuration with all defaults as TOML. Reading it returns an equal Config."""
        return tomli_w.dumps(self.document())

    def document(self) -> dict[str, Any]:
        """Return the whole configuration as nested dictionaries."""
        document: dict[str, Any] = _plain(self)
        return document


def read_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file. `overrides` are texts `section.key=value` that take precedence over the file."""
    return from_document(read_document(path, overrides))


def read_document(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a TOML file as nested dictionaries, without checking any setting."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError("VFL-1021", f'cannot read the config file "{path}": {error.strerror}.') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("VFL-1022", f'"{path}" must be a TOML file. {error}.') from error
    for override in overrides or []:
        _override(document, override)
    _anchor_paths(document, path.parent)
    return document


def from_document(document: dict[str, Any]) -> Config:
    """Make a Config from nested dictionaries, as tomllib returns them."""
    return make(Config, _with_table_defaults(document) if _takes_table_defaults(document) else document)


def _takes_table_defaults(document: dict[str, Any]) -> bool:
    """Return whether the run uses tables and its configuration does not choose another model.

    Runs with private modes or secure sums keep the general defaults, because they need features that do not
    depend on other records.
    """
    sections = {name: document.get(name, {}) for name in ("data", "model", "privacy")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return False
    given = sections["model"].get("embedding", "tabular")
    tabular = sections["data"].get("name") in ("csv", "tables")
    return tabular and given == "tabular" and not sections["privacy"]


def _with_table_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the defaults for tables filled in. Its own values take precedence."""
    whole = dict(document)
    for name, defaults in TABLE_DEFAULTS.items():
        values = document.get(name, {})
        whole[name] = {**defaults, **values} if isinstance(values, dict) else values
    return whole


def _override(document: dict[str, Any], text: str) -> None:
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("VFL-1023", f'--set takes section.key=value. Found "{text}".')
    *sections, last = keys
    for name in sections:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise ConfigError("VFL-1024", f'--set {text}: "{name}" is not a section.')
    try:
        document[last] = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        document[last] = value.strip()  # a word without quotes is a string: --set rule.name=sync


def _anchor_paths(document: dict[str, Any], folder: Path) -> None:
    """Make relative paths absolute. They start at the configuration file's folder."""
    for name, key, declared in declarations(Config):
        table = document.get(name)
        if declared.is_path and isinstance(table, dict) and isinstance(table.get(key), str) and table[key]:
            table[key] = str((folder / table[key]).resolve())
    tables = document.get("tables")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        if isinstance(table, dict):
            table.setdefault("alignment", f"{name}.alignment.parquet")
            for key in ("path", "alignment"):
                if isinstance(table.get(key), str) and table[key]:
                    table[key] = str((folder / table[key]).resolve())


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        entries = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: _plain(entry) for name, entry in entries.items() if entry is not None}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
