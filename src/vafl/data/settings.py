"""What a configuration says of the data: which set, whose columns, one party's own table."""

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
    """Raise ConfigError unless every name can be a client's, and is there once."""
    try:
        for name in names:
            check_client(name)
    except ConfigError as error:
        raise ConfigError("VFL-2241", f"{setting}: {error}") from None
    if len(set(names)) < len(names):
        raise ConfigError("VFL-2242", f"{setting} must name each client once. Found {list(names)}.")


@dataclass(frozen=True)
class DataSettings:
    """Which data set, and how it is made ready.

    Attributes:
        name: one that scikit-learn carries (`digits`, `breast_cancer`, `wine`, `iris`, `diabetes`), a
            public one in the data folder (`mnist`, `fashion_mnist`, `cifar10`, `parkinson`, `modelnet40`,
            `physionet2012`, `mimic3`, `adult`, `credit_default`), `csv` for one file whose columns
            [partition] deals to the parties, or `tables` for one file a party, as [tables.NAME] says.
        path: the CSV or Parquet file; a relative path is taken from the config file's folder.
        label: its label column.
        weight: its column that says how much each row counts in the training loss, numbers of 0 or more; of
            tables, tables.server.weight does. It is never a feature. Metrics and baselines are not weighted.
        ignore: its columns that are neither features nor the label, by name or pattern (`pay_*`).
        task: `classification` or `regression`, for a CSV or tables.
        parties: for tables: the clients that connect to the server, in the order in which every party names
            them. The label holder's own features need no name here.
        records: for tables: `common` trains on the records that every party has; `labelled` on all of the
            label holder's, with an embedding that is learnt for those that a client lacks.
        test_fraction: share of rows held out for testing, where the set has no test rows of its own.
        validation_fraction: share of rows held out to watch the training by; 0 watches the test rows.
        scale: `standard` scales every column by the training rows: columns of a `csv` or of `tables` by
            median and quartiles, with a smooth clip, others to zero mean and unit deviation. `none` leaves
            them. `auto` scales everything but images, which are in 0..1 already.
        folder: where public data sets lie; `--data` or VAFL_DATA set it too.
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
                "data.validation_fraction must be 0 or more, and leave rows to train on beside "
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
            instead = "Name it in tables.server.weight." if self.name == "tables" else "Leave it out."
            raise ConfigError(
                "VFL-2247",
                f'data.weight is a column of data.path, for data.name = "csv". Found "{self.weight}" with '
                f'data.name = "{self.name}". {instead}',
            )

    def _check_parties(self) -> None:
        _check_clients(self.parties, "data.parties")
        if self.name == "tables" and not self.parties:
            raise ConfigError(
                "VFL-2248",
                'data.name = "tables" needs data.parties, the names of the clients. Found none. Name each '
                f'client once; "{LABEL_HOLDER}" is the label holder.',
            )

    @property
    def is_tabular(self) -> bool:
        """Whether parties read and encode tables: a file each, or their columns of one file."""
        return self.name in ("csv", "tables")

    @property
    def title(self) -> str:
        """What the data set is called where a run is shown."""
        return Path(self.path).name if self.name == "csv" else self.name


@dataclass(frozen=True)
class PartitionSettings:
    """Who holds which columns.

    Attributes:
        clients: number of parties, each with an equal share, when no groups are given.
        groups: party name -> its columns, by name or pattern (`pay_*`), for tables and series.
        layout: for images: `columns` deals out flat pixels, `bands` horizontal bands that stay
            images, `views` whole views or channels (both for cnn), `sequence` vertical bands read line by
            line (for lstm). Series keep their steps with `sequence`, and with groups.
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
    """One party's own table; NAME is the party's, and `server` is who holds the labels.

    Attributes:
        path: the file, CSV or Parquet; a relative path is taken from the config file's folder.
        id: the column that says whose line it is: text or whole numbers, each once.
        label: the column to learn, of the server's table only; predictions can do without.
        weight: how much each record counts in the training loss, a column of the server's table only: numbers
            of 0 or more. It is never a feature. Metrics and baselines are not weighted. Left out: all
            records count the same.
        features: columns to use, by name or pattern (`pay_*`); left out: all but id and label. The server's
            are used too, by a client inside its process.
        ignore: columns not to use, by name or pattern; `["*"]` uses none of the server's.
        categories: columns of numbers that are names of categories, by name or pattern.
        most_categories: so many categories of a column get a column each; the rarer ones share one.
        missing: what stands for a missing value in a column of text, beside an empty field.
        separator: between the fields of a CSV.
        groups: name -> columns, by name or pattern, whose importance the server may measure together; the
            server learns the names of the groups, and see prediction.importance for what else.
        alignment: the file of `vafl align`; left out: NAME.alignment.parquet beside the config file.
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
            raise ConfigError("VFL-2252", f'the label cannot be the id. Found "{self.label}" for both.')
        if self.weight and self.weight in (self.id, self.label):
            raise ConfigError(
                "VFL-2253", f'the weight cannot be the id or the label. Found "{self.weight}" for both.'
            )
