"""The configuration of a run. Each section is a frozen dataclass in the package that uses it.

Reading is strict. An unknown key is an error with a suggestion, a wrong type is an error that names the
expected type, and each section checks its values when it is created. vafl.config.files reads the files.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any, Self

import tomli_w

from vafl.config.run_settings import EvaluationSettings, PredictionSettings, StopSettings
from vafl.conversion import make
from vafl.data.settings import LABEL_HOLDER, DataSettings, PartitionSettings
from vafl.data.source_settings import SourceSettings, TableSettings
from vafl.errors import ConfigError
from vafl.models.decisions import DecisionSettings
from vafl.models.settings import EmbeddingSettings, ModelSettings
from vafl.names import table_owner
from vafl.privacy.settings import LabelSettings, PrivacySettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import OptimiserSettings, RuleSettings
from vafl.scope import Scope, declarations, section, setting
from vafl.simulation.delays import DelaySettings
from vafl.transport.settings import NetworkSettings

_LARGEST_SEED = 2**53  # random streams count up from it, and JSON readers lose the digits of larger integers
INHERITED = ("optimiser", "privacy")  # sections of a party that take missing keys from the general ones
# The defaults for tables: chosen on six public tables, judged on five others (python -m experiments.tables).
TABLE_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"test_fraction": 0.2, "validation_fraction": 0.1},
    "model": {"head": "tabular", "combine": "concat"},
    "embedding": {"model": "auto"},
    "rule": {"lead": 2.0},
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
class PartySettings:
    """[parties.NAME]: what one party chooses alone. `party.toml` holds the same for one party.

    Attributes:
        source: the party's data, for data.name = "parties".
        embedding: its embedding network. The default is the section [embedding].
        optimiser: its optimiser. Keys that it leaves out come from the section [optimiser].
        local_steps: how many steps it makes on one answer; 0 is rule.local_steps.
        privacy: its budget and ledger. Keys that it leaves out come from the section [privacy].
    """

    source: SourceSettings | None = None
    embedding: EmbeddingSettings | None = None
    optimiser: OptimiserSettings | None = None
    local_steps: int = 0
    privacy: PrivacySettings | None = None


@dataclass(frozen=True)
class Config:
    """All settings of a run that one party knows.

    Attributes:
        party: the party whose file this is; empty in a file for all parties.
        seed: determines initial models, batches, test rows and delays, but never the privacy noise.
        threads: the number of threads that torch and numpy use. Small models are fastest with one.
        parties: party name -> what it chooses alone. The label holder's name is "server".
    """

    party: str = setting("", scope=Scope.PARTY)
    seed: int = setting(0, scope=Scope.MODEL)
    threads: int = setting(1, scope=Scope.PARTY)
    data: DataSettings = section(DataSettings, Scope.MODEL)
    parties: dict[str, PartySettings] = field(default_factory=dict)
    partition: PartitionSettings = section(PartitionSettings, Scope.MODEL)
    model: ModelSettings = section(ModelSettings, Scope.MODEL)
    embedding: EmbeddingSettings = section(EmbeddingSettings, Scope.PARTY)
    decision: DecisionSettings = section(DecisionSettings, Scope.SERVER)
    rule: RuleSettings = section(RuleSettings, Scope.TRAINING, may_change=True)
    schedule: ScheduleSettings = section(ScheduleSettings, Scope.TRAINING)
    optimiser: OptimiserSettings = section(OptimiserSettings, Scope.PARTY, may_change=True)
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
        self._check_parties()
        self._check_weights()
        for name in self._clients():
            own = self.parties.get(name)
            (self.privacy if own is None or own.privacy is None else own.privacy).check_budget()
        if self.privacy.secure_sum:
            self._check_secure_sum()

    @property
    def sources(self) -> dict[str, SourceSettings]:
        """Party -> the source of its data, for the parties that this configuration describes."""
        return {name: own.source for name, own in self.parties.items() if own.source is not None}

    @property
    def holder_table(self) -> TableSettings | None:
        """The label holder's table; None if this configuration does not describe it."""
        source = self.sources.get(LABEL_HOLDER)
        return source if isinstance(source, TableSettings) else None

    def of(self, party: str) -> Self:
        """Return the configuration with the settings that this party chooses in place of the general ones."""
        own = self.parties.get(table_owner(party))
        if own is None:
            return self
        return replace(
            self,
            embedding=own.embedding or self.embedding,
            optimiser=own.optimiser or self.optimiser,
            rule=replace(self.rule, local_steps=own.local_steps) if own.local_steps else self.rule,
            privacy=own.privacy or self.privacy,
        )

    def with_sources(self, sources: dict[str, SourceSettings]) -> Self:
        """Return the configuration with other sources for these parties."""
        changed = {
            name: replace(self.parties.get(name, PartySettings()), source=source)
            for name, source in sources.items()
        }
        return replace(self, parties={**self.parties, **changed})

    def _clients(self) -> tuple[str, ...]:
        """Return the clients that this configuration is for; "" if the general sections are for all of them.

        The label holder may have no features. Its own client is checked when it is made.
        """
        if self.party:
            return () if self.party == LABEL_HOLDER else (self.party,)
        return self.data.parties or ("",)

    def _check_parties(self) -> None:
        known = (LABEL_HOLDER, *self.data.parties)
        for name, own in self.parties.items():
            if self.data.name == "parties" and name not in known:
                raise ConfigError(
                    "VFL-1016",
                    f"[parties.NAME] must name a party of this run: {', '.join(known)}. Found "
                    f'[parties.{name}]. Add "{name}" to data.parties, or remove the section.',
                )
            if own.local_steps < 0:
                raise ConfigError(
                    "VFL-1009",
                    f"parties.{name}.local_steps must be 1 or more, or 0 for rule.local_steps. Found "
                    f"{own.local_steps}.",
                )
            if isinstance(own.source, TableSettings):
                self._check_table(name, own.source)
            elif own.source is not None and name == LABEL_HOLDER:
                raise ConfigError(
                    "VFL-1028",
                    f"[parties.{LABEL_HOLDER}.source] must be a table, because it has the labels. Found kind "
                    f'"{own.source.kind}". Add that data as a client of another name.',
                )
            self._check_shared(name, own)

    def _check_shared(self, name: str, own: PartySettings) -> None:
        """Raise ConfigError if a party's section changes a setting that all parties share."""
        for section_name, key, declared in declarations(type(self)):
            mine = getattr(own, section_name) if section_name in INHERITED else None
            if mine is None or declared.scope in (Scope.PARTY, Scope.SERVER):
                continue
            value, shared = getattr(mine, key), getattr(getattr(self, section_name), key)
            if value != shared:
                raise ConfigError(
                    "VFL-1027",
                    f"{section_name}.{key} must be the same at all parties. Found {value!r} in "
                    f"[parties.{name}.{section_name}], and {shared!r} in [{section_name}]. Remove it from "
                    "the party's section.",
                )

    @staticmethod
    def _check_table(name: str, table: TableSettings) -> None:
        if not (table.path and table.id):
            raise ConfigError(
                "VFL-1015",
                f"[parties.{name}.source] needs path (the file) and id (the column that identifies the "
                f'record). Found path "{table.path}", id "{table.id}".',
            )
        if table.label and name != LABEL_HOLDER:
            raise ConfigError(
                "VFL-1017",
                f"only the server has labels: [parties.{LABEL_HOLDER}.source] names their column. "
                f'Found label = "{table.label}" in [parties.{name}.source]. Remove it there.',
            )
        if table.weight and name != LABEL_HOLDER:
            raise ConfigError(
                "VFL-1018",
                f"only the server has weights of records: [parties.{LABEL_HOLDER}.source] names their "
                f'column. Found weight = "{table.weight}" in [parties.{name}.source]. Remove it there.',
            )

    def _check_weights(self) -> None:
        """Refuse record weights if labels are protected.

        A weight scales the gradient of its record. If it depends on the record's true label, it reveals what
        randomised response hides.
        """
        column = self.data.weight if self.holder_table is None else self.holder_table.weight
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
            *(
                (name, embedding, "linear", "only scores of linear models can be summed")
                for name, embedding in self._embeddings()
            ),
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

    def _embeddings(self) -> list[tuple[str, str]]:
        """Return the name and the value of each setting that chooses an embedding."""
        own = [
            (f"parties.{name}.embedding.model", own.embedding.model)
            for name, own in self.parties.items()
            if own.embedding is not None
        ]
        clients = self.data.parties
        each_has_its_own = bool(own) and (self.party or (clients and set(clients) <= set(self.parties)))
        return own if each_has_its_own else [*own, ("embedding.model", self.embedding.model)]

    def to_toml(self) -> str:
        """Return the whole configuration with all defaults as TOML. Reading it returns an equal Config."""
        return tomli_w.dumps(self.document())

    def document(self) -> dict[str, Any]:
        """Return the whole configuration as nested dictionaries."""
        document: dict[str, Any] = _plain(self)
        return document


def from_document(document: dict[str, Any]) -> Config:
    """Make a Config from nested dictionaries, as tomllib returns them."""
    document = with_clients(document)
    document = with_table_defaults(document) if takes_table_defaults(document) else document
    return make(Config, _with_general_keys(document))


def with_clients(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the clients' names, in the order of their sections, unless it lists them."""
    data, parties = document.get("data"), document.get("parties")
    if not (isinstance(data, dict) and isinstance(parties, dict)):
        return document
    if data.get("name") != "parties" or "parties" in data or LABEL_HOLDER not in parties:
        return document
    return {**document, "data": {**data, "parties": [name for name in parties if name != LABEL_HOLDER]}}


def takes_table_defaults(document: dict[str, Any]) -> bool:
    """Return whether the run uses tables and its configuration does not choose another model.

    Runs with private modes or secure sums keep the general defaults, because they need features that do not
    depend on other records.
    """
    sections = {name: document.get(name, {}) for name in ("data", "embedding", "privacy")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return False
    given = sections["embedding"].get("model", "auto")
    tabular = sections["data"].get("name") in ("csv", "parties")
    return tabular and given in ("auto", "tabular") and not sections["privacy"]


def with_table_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the defaults for tables filled in. Its own values take precedence."""
    whole = dict(document)
    for name, defaults in TABLE_DEFAULTS.items():
        values = document.get(name, {})
        whole[name] = {**defaults, **values} if isinstance(values, dict) else values
    return whole


def _with_general_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with each party's optimiser and privacy completed by the general sections."""
    parties = document.get("parties")
    if not isinstance(parties, dict):
        return document
    whole = {}
    for name, own in parties.items():
        if isinstance(own, dict):
            shared = {key: document.get(key, {}) for key in INHERITED if isinstance(own.get(key), dict)}
            completed = {key: {**values, **own[key]} for key, values in shared.items()}
            if "name" in own.get("optimiser", {}) and "options" not in own["optimiser"]:
                completed["optimiser"].pop("options", None)  # they belong to another optimiser
            whole[name] = own | completed
        else:
            whole[name] = own
    return {**document, "parties": whole}


def seen_by(document: dict[str, Any], party: str) -> dict[str, Any]:
    """Return the document as one party sees it: its own sections take the place of the general ones.

    Of [parties.NAME], only the sources remain.
    """
    parties = document.get("parties")
    if not isinstance(parties, dict):
        return document
    own = parties.get(table_owner(party), {})
    chosen = {key: own[key] for key in ("embedding", *INHERITED) if isinstance(own, dict) and key in own}
    for key in INHERITED:
        if key in chosen and isinstance(general := document.get(key), dict):
            chosen[key] = {**general, **chosen[key]}
    sources = {
        name: {"source": entries["source"]}
        for name, entries in parties.items()
        if isinstance(entries, dict) and "source" in entries
    }
    return {**document, **chosen, "parties": sources}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        entries = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: _plain(entry) for name, entry in entries.items() if entry is not None}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
