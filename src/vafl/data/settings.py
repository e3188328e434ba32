"""The [data] and [partition] sections of a configuration."""

from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

# source_settings is the home of TableSettings.
from vafl.errors import ConfigError
from vafl.names import SERVER, check_client
from vafl.scope import Scope, setting

LABEL_HOLDER = SERVER
NAMES = (
    *("digits", "breast_cancer", "wine", "iris", "diabetes"),
    *("mnist", "fashion_mnist"),
    *("cifar10", "parkinson", "modelnet40", "physionet2012", "mimic3", "adult", "credit_default"),
    *("csv", "parties"),
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
            divides among the parties. With `parties`, each party has its own data, which its
            [parties.NAME.source] describes.
        path: for `csv`: the CSV or Parquet file. A relative path starts at the config file's folder.
        label: for `csv`: the label column.
        weight: for `csv`: the column with the weight of each row in the training loss, numbers of 0 or more.
            It is never a feature. Metrics and baselines are not weighted. For `parties`, set
            parties.server.source.weight instead.
        ignore: for `csv`: columns that are not used as features, by name or pattern (`pay_*`).
        task: `classification` or `regression`, for `csv` and `parties`.
        parties: for `parties`: the clients that connect to the server. Every party must list them in the same
            order. The label holder's own features are not listed.
        records: for `parties`: `common` trains on the records that every party has. `labelled` trains on all
            records of the label holder, and learns an embedding for records that a client does not have.
        test_fraction: the share of rows held out for testing, if the data set has no test rows.
        validation_fraction: the share of rows held out for evaluations during training; 0 uses the test rows.
        scale: `standard` scales every column by its training rows: for `csv` and `parties` by median and
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
            holder = "Set parties.server.source.weight instead."
            instead = holder if self.name == "parties" else "Leave it out."
            raise ConfigError(
                "VFL-2247",
                f'data.weight is only for data.name = "csv". Found "{self.weight}" with '
                f'data.name = "{self.name}". {instead}',
            )

    def _check_parties(self) -> None:
        _check_clients(self.parties, "data.parties")
        if self.name == "parties" and not self.parties:
            raise ConfigError(
                "VFL-2248",
                'data.name = "parties" needs data.parties, the names of the clients. Found none. List each '
                f'client once, without the label holder "{LABEL_HOLDER}".',
            )

    @property
    def is_tabular(self) -> bool:
        """Return whether parties read and encode sources: their own, or columns of one file."""
        return self.name in ("csv", "parties")

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
