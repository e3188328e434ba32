"""The [data], [partition] and [tables.NAME] sections of a configuration."""

from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from vafl.errors import ConfigError
from vafl.names import SERVER, check_client
from vafl.scope import Scope, setting

LABEL_HOLDER = SERVER
NAMES = (
    *("digits", "breast_cancer", "wine", "iris", "diabetes"),
    *("mnist", "fashion_mnist"),
    *("cifar10", "parkinson", "modelnet40", "physionet2012", "mimic3", "adult", "credit_default"),
    *("csv", "tables"),
)


def _check_clients(names: Collection[str], setting: str) -> None:
    """Raise ConfigError unless every name is valid for a client, and no name occurs twice."""
    try:
        for name in names:
            check_client(name)
    except ConfigError as error:
        raise ConfigError("VFL-2241", f"{setting}: {error}") from None
    if len(set(names)) < len(names):
        raise ConfigError("VFL-2242", f"{setting} must name each client once. Found {list(names)}.")


@dataclass(frozen=True)
class DataSettings:
    """The data set, its label, and how rows are split and scaled.

    Attributes:
        name: the data set. Bundled with scikit-learn: `digits`, `breast_cancer`, `wine`, `iris`, `diabetes`.
            Public, in the data folder: `mnist`, `fashion_mnist`, `cifar10`, `parkinson`, `modelnet40`,
            `physionet2012`, `mimic3`, `adult`, `credit_default`. `csv` is one file whose columns [partition]
            divides among the parties. `tables` is one file per party, set in [tables.NAME].
        path: for `csv`: the CSV or Parquet file. A relative path starts at the config file's folder.
        label: for `csv`: the label column.
        weight: for `csv`: the column with the weight of each row in the training loss, numbers of 0 or more.
            It is never a feature. Metrics and baselines are not weighted. For `tables`, set
            tables.server.weight instead.
        ignore: for `csv`: columns that are not used as features, by name or pattern (`pay_*`).
        task: `classification` or `regression`, for `csv` and `tables`.
        parties: for `tables`: the clients that connect to the server. Every party must list them in the same
            order. The label holder's own features are not listed.
        records: for `tables`: `common` trains on the records that every party has. `labelled` trains on all
            records of the label holder, and learns an embedding for records that a client does not have.
        test_fraction: the share of rows held out for testing, if the data set has no test rows.
        validation_fraction: the share of rows held out for evaluations during training; 0 uses the test rows.
        scale: `standard` scales every column by its training rows: for `csv` and `tables` by median and
            quartiles with a smooth clip, otherwise to zero mean and unit deviation. `none` does not scale.
            `auto` scales everything except images, which are in 0..1 already.
        folder: the folder of the public data sets; `--data` or VAFL_DATA set it too.
    """

    name: str = "digits"
    path: str = setting("", scope=Scope.PARTY, is_path=True)
    label: str = ""
    weight: str = setting("", scope=Scope.PARTY)
    ignore: tuple[str, ...] = ()
    task: Literal["classification", "regression"] = "classification"
    parties: tuple[str, ...] = ()
    records: Literal["common", "labelled"] = "common"
    test_fraction: float = 0.25
    validation_fraction: float = 0.0
    scale: Literal["auto", "standard", "none"] = "auto"
    folder: str = setting("", scope=Scope.PARTY)

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            near = get_close_matches(self.name, NAMES, 1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ConfigError(
                "VFL-2243", f'data.name must be one of {", ".join(NAMES)}. Found "{self.name}".{hint}'
            )
        if not 0 < self.test_fraction < 1:
            raise ConfigError(
                "VFL-2244", f"data.test_fraction must be between 0 and 1. Found {self.test_fraction}."
            )
        if not 0 <= self.validation_fraction < 1 - self.test_fraction:
            raise ConfigError(
                "VFL-2245",
                "data.validation_fraction must be 0 or more, and must leave training rows besides "
                f"data.test_fraction = {self.test_fraction}. Found {self.validation_fraction}.",
            )
        self._check_parties()
        if self.name == "csv" and not (self.path and self.label):
            raise ConfigError(
                "VFL-2246",
                'data.name = "csv" needs data.path (the file) and data.label (its label column). '
                f'Found path "{self.path}", label "{self.label}".',
            )

        if self.weight and self.name != "csv":
            instead = "Set tables.server.weight instead." if self.name == "tables" else "Leave it out."
            raise ConfigError(
                "VFL-2247",
                f'data.weight is only for data.name = "csv". Found "{self.weight}" with '
                f'data.name = "{self.name}". {instead}',
            )

    def _check_parties(self) -> None:
        _check_clients(self.parties, "data.parties")
        if self.name == "tables" and not self.parties:
            raise ConfigError(
                "VFL-2248",
                'data.name = "tables" needs data.parties, the names of the clients. Found none. List each '
                f'client once, without the label holder "{LABEL_HOLDER}".',
            )

    @property
    def is_tabular(self) -> bool:
        """Return whether parties read and encode tables: one file each, or columns of one file."""
        return self.name in ("csv", "tables")

    @property
    def title(self) -> str:
        """The data set's name for reports: the file name of a CSV, otherwise `name`."""
        return Path(self.path).name if self.name == "csv" else self.name


@dataclass(frozen=True)
class PartitionSettings:
    """Which party holds which columns.

    Attributes:
        clients: the number of parties that divide the columns evenly, if there are no groups.
        groups: party name -> its columns, by name or pattern (`pay_*`), for tables and series.
        layout: what the parties divide. For images: `columns` are flat pixels, `bands` are horizontal bands
            that stay images, `views` are whole views or channels (both for cnn), and `sequence` is vertical
            bands that are read line by line (for lstm). Series keep their steps with `sequence` or groups.
    """

    clients: int = 2
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Literal["columns", "bands", "views", "sequence"] = "columns"

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ConfigError("VFL-2249", f"partition.clients must be 1 or more. Found {self.clients}.")
        _check_clients(self.groups, "partition.groups")


@dataclass(frozen=True)
class TableSettings:
    """One party's table. NAME is the party's name; the label holder's name is `server`.

    Attributes:
        path: the CSV or Parquet file. A relative path starts at the config file's folder.
        id: the column that identifies the record: text or integers, without duplicates.
        label: the column to predict, in the server's table only. Predictions do not need it.
        weight: the column with the weight of each record in the training loss, numbers of 0 or more, in the
            server's table only. It is never a feature. Metrics and baselines are not weighted. By default,
            all records have the same weight.
        features: the columns to use, by name or pattern (`pay_*`). The default is all columns except id,
            label and weight. The server's features are used too, by a client inside its process.
        ignore: columns not to use, by name or pattern. `["*"]` uses no column of the server's table.
        categories: number columns whose values are categories, by name or pattern.
        most_categories: the number of categories of a column that get a feature each. Rarer ones share one
            feature.
        missing: texts that mean a missing value, in addition to an empty field.
        separator: the character between the fields of a CSV.
        groups: name -> columns, by name or pattern, whose importance the server may measure together. The
            server learns the names of the groups; prediction.importance says what else it learns.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
    """

    path: str
    id: str
    label: str = ""
    weight: str = ""
    features: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    most_categories: int = 32
    missing: tuple[str, ...] = ("NA", "N/A", "NaN", "nan", "null", "NULL", "?")
    separator: str = ","
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alignment: str = ""

    def __post_init__(self) -> None:
        if len(self.separator.encode()) != 1:
            raise ConfigError(
                "VFL-2250", f'separator must be one character, such as ";". Found "{self.separator}".'
            )
        if self.most_categories < 1:
            raise ConfigError("VFL-2251", f"most_categories must be 1 or more. Found {self.most_categories}.")
        if self.label and self.label == self.id:
            raise ConfigError(
                "VFL-2252",
                f'the label and the id must be different columns. Found "{self.label}" for both.',
            )
        if self.weight and self.weight in (self.id, self.label):
            raise ConfigError(
                "VFL-2253",
                f'the weight must not be the id or the label column. Found "{self.weight}" for both.',
            )
