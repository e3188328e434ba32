"""One TOML describes a run. Every section is a frozen settings object of the room that uses it.

Reading is strict: unknown keys fail with "did you mean", wrong types name what was expected, and the
settings check their own values when they are made.
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

_LARGEST_SEED = 2**53  # streams count up from it, and what reads JSON knows no larger whole number
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
    """Everything that decides a run.

    Attributes:
        seed: fixes initial models, batches, test rows and delays (never the privacy noise).
        threads: of the arithmetic, torch's and numpy's; small models are fastest with one.
        tables: party name -> its own table, for data.name = "tables"; a party's file needs its own only.
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
                "stop.patience needs data.validation_fraction above 0: a run that ends when the test rows "
                "like it best says nothing about other rows. Found 0.",
            )
        if self.rule.name == "sync" and self.schedule.seed == "private":
            raise ConfigError(
                "VFL-1014",
                'schedule.seed = "private" keeps a client\'s batches to itself, and rule.name = "sync" gives '
                'all clients the same. Set schedule.seed = "shared", or another rule.',
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
                    f"[tables.{name}] needs path (the file) and id (the column that says whose line it is). "
                    f'Found path "{table.path}", id "{table.id}".',
                )
            if name not in known:
                raise ConfigError(
                    "VFL-1016",
                    f'[tables.{name}] is no party of this run. Its parties: {", ".join(known)}. Add "{name}" '
                    "to data.parties, or take the section out.",
                )
            if table.label and name != LABEL_HOLDER:
                raise ConfigError(
                    "VFL-1017",
                    f"the labels are the server's: [tables.{LABEL_HOLDER}] names their column, and no other "
                    f'section does. Found label = "{table.label}" in [tables.{name}].',
                )
            if table.weight and name != LABEL_HOLDER:
                raise ConfigError(
                    "VFL-1018",
                    f"the weights of records are the server's: [tables.{LABEL_HOLDER}] names their column. "
                    f'Found weight = "{table.weight}" in [tables.{name}]. Name it there, or leave it out.',
                )

    def _check_weights(self) -> None:
        """Refuse weights of records beside labels that are protected.

        A weight scales the gradient of its record, and it may depend on the record's true label, which
        randomised response would then not hide.
        """
        column = self.tables[LABEL_HOLDER].weight if LABEL_HOLDER in self.tables else self.data.weight
        if column and self.labels.epsilon:
            raise ConfigError(
                "VFL-1019",
                "labels.epsilon guarantees that gradients say little about a record's label, but a weight "
                f'scales them by a value that may depend on it. Found the weight column "{column}". Leave it '
                "out, or use model.class_weight, which follows from the labels that were drawn.",
            )

    def _check_secure_sum(self) -> None:
        """Masks cancel in the sum over all clients of one round, and in nothing else."""
        model, rule, network = self.model, self.rule, self.network
        asynchronous = "asynchronous release would reveal differences between a client's embeddings"
        fresh = "every round sums its rows anew"
        alone = "where all clients but one lack a record, the sum is that client's score and constants"
        needs = (
            ("data.records", self.data.records, "common", alone),
            ("rule.name", rule.name, "sync", asynchronous),
            ("rule.order", rule.order, "upload-first", "a round is summed and answered at once"),
            ("rule.start", rule.start, "zeros", fresh),
            ("rule.delay_bound", rule.delay_bound, 0, fresh),
            ("schedule.refresh", self.schedule.refresh, "none", fresh),
            ("model.embedding", model.embedding, "linear", "scores of other models are not what is summed"),
            ("model.head", model.head, "bias", "other heads see more of the embeddings than scores"),
            ("network.encoding", network.encoding, "float32", "masked scores cannot be rounded"),
            ("network.largest_norm", network.largest_norm, 0.0, "the server sees no embedding to measure"),
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
        """The whole configuration, defaults included, as a file that reads back to the same."""
        return tomli_w.dumps(self.document())

    def document(self) -> dict[str, Any]:
        """The same as nested dictionaries."""
        document: dict[str, Any] = _plain(self)
        return document


def read_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Reads a TOML file; `overrides` are `section.key=value` and win over the file."""
    return from_document(read_document(path, overrides))


def read_document(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The same as nested dictionaries, before any setting is checked."""
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
    """Make a Config from nested dictionaries, as tomllib gives them."""
    return make(Config, _with_table_defaults(document) if _takes_table_defaults(document) else document)


def _takes_table_defaults(document: dict[str, Any]) -> bool:
    """Whether the run is on one table or several, and leaves the model open.

    Private modes and secure sums are for models whose features depend on no other record. They keep the
    general defaults.
    """
    sections = {name: document.get(name, {}) for name in ("data", "model", "privacy")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return False
    given = sections["model"].get("embedding", "tabular")
    tabular = sections["data"].get("name") in ("csv", "tables")
    return tabular and given == "tabular" and not sections["privacy"]


def _with_table_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the defaults for tables in place of the general ones. What it gives stays."""
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
        document[last] = value.strip()  # a bare word is a string: --set rule.name=sync


def _anchor_paths(document: dict[str, Any], folder: Path) -> None:
    """Relative files in a config are meant from where the config lies."""
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
