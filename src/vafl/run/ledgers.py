"""Locate and open the parties' privacy ledgers, and map the rows of a run to ledger accounts."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import polars as pl

from vafl.arrays import Integers
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.names import LOCAL_CLIENT, table_owner
from vafl.observe.record import LEDGERS, SIMULATED_LEDGERS
from vafl.privacy.ledger.accounts import NOBODY
from vafl.privacy.ledger.journal import has_journal
from vafl.privacy.ledger.ledger import Ledger, read_ledger
from vafl.privacy.ledger.spender import Spender

if TYPE_CHECKING:
    from vafl.privacy.ledger.statement import Statement

log = logging.getLogger(__name__)


def ledger_path(config: Config, party: str, run: Path) -> Path:
    """Return the path of a party's ledger.

    The ledger of a party's own data is next to the data, not in the run folder: what was spent on a person
    must survive every run and every alignment.
    """
    name = f"{party}.ledger"
    if folder := config.of(party).privacy.ledger:
        return Path(folder) / name
    if (owner := table_owner(party)) in config.sources:
        source = config.sources[owner]
        return Path(getattr(source, "path", "") or source.alignment).parent / name
    return run / LEDGERS / name


def find_ledgers(config: Config, run: Path) -> list[Path]:
    """Return the paths of the ledgers that the run's parties have on this machine."""
    if config.sources:
        paths = [ledger_path(config, party, run) for party in (*config.sources, LOCAL_CLIENT)]
    else:
        paths = list(Path(config.privacy.ledger or run / LEDGERS).glob("*.ledger"))
    return sorted(path for path in paths if has_journal(path))


def run_ledgers(config: Config, run: Path) -> list[Path]:
    """Return the paths of the ledgers that a run charged: simulated ones, or those of its parties."""
    return sorted((run / SIMULATED_LEDGERS).glob("*.ledger")) or find_ledgers(config, run)


def read_statements(config: Config, run: Path) -> list["Statement"]:
    """Return a statement of every ledger of a run on this machine; empty if the run was not private."""
    if config.privacy.kind == "none":
        return []
    ledgers = [(path, read_ledger(path)) for path in run_ledgers(config, run)]
    return [make_statement(path, ledger, config) for path, ledger in ledgers if ledger.spenders]


def make_statement(path: Path, ledger: Ledger, config: Config) -> "Statement":
    """Return a statement of a party's ledger, under the settings of a run."""
    from vafl.privacy.ledger.statement import Statement  # noqa: PLC0415 - loads scipy, which no client needs

    own = config.of(path.stem)
    return Statement(path.stem, ledger, own.privacy, own.schedule.batch_size, own.rule.local_steps)


def is_entered(config: Config, party: str, path: Path | None) -> bool:
    """Return whether a party records its uploads in a ledger.

    It does in every private mode. If the ledger exists already, it does in mode "none" too: readers would
    otherwise trust a ledger that shows less than the party has sent.

    Args:
        path: the path of the ledger, which may not exist; None in a simulation.

    Raises:
        ConfigError: the ledger exists, and the run would send unprotected embeddings without the user having
            chosen mode "none".
    """
    if config.privacy.kind != "none":
        return True
    if path is None or not has_journal(path):
        return False
    if config.privacy.mode == "auto":
        raise ConfigError(
            "VFL-7111",
            f'the records of {party} have a privacy ledger, "{path}", so privacy.mode must be set '
            'explicitly. Found privacy.mode = "auto" and no noise. Choose a mode. privacy.mode = "none" '
            "sends embeddings without noise, and the ledger will then show these records as unbounded for "
            "good.",
        )
    log.warning('privacy.mode none: every record whose embedding is sent becomes unbounded in "%s"', path)
    return True


def open_ledger(
    config: Config,
    party: str,
    ids: pl.Series,
    source: str,
    parties: Sequence[str],
    *,
    run: Path | None = None,
    path: Path | None = None,
    purpose: Literal["training", "prediction"] = "training",
    accept_ledger: bool = False,
) -> tuple[Ledger, Integers]:
    """Open a party's ledger and register the run in it.

    Args:
        ids: [rows], the party's ids; null for records it does not have.
        source: identifies the data set, if its ids are only record numbers.
        run: the folder of the run that will charge the ledger; None for a simulation, which sends nothing
            and keeps its ledger in memory.
        path: the ledger's file; None uses `ledger_path`.
        accept_ledger: continue if the ledger lacks the last mark that the server received.

    Returns:
        The ledger, and the account number of each row, [rows].
    """
    if run is not None:
        path = path or ledger_path(config, party, run)
    ledger = Ledger(path, _identity(config, party, source, len(ids)), accepts_mark=accept_ledger)
    is_new = not ledger.spenders
    folder = "" if run is None else str(run.resolve())
    batch, steps = config.schedule.batch_size, config.rule.local_steps
    spender = Spender(folder, purpose, tuple(parties), config.privacy, batch, steps)
    accounts = ledger.begin(spender, ids)
    if path is not None:
        people = accounts[accounts != NOBODY]
        most = math.sqrt(float(ledger.spent[people].max(initial=0.0)))
        log.info(
            'privacy ledger "%s" (%s): at most mu %.4g has been spent on any of the %d records of this run',
            path,
            "new" if is_new else "continued",
            most,
            len(people),
        )
    return ledger, accounts


def _identity(config: Config, party: str, source: str, records: int) -> str:
    """Return a text that identifies the meaning of the ids in a ledger.

    An id in a table denotes the same person in every run. A record number denotes a record only within one
    data set of one size.
    """
    if (owner := table_owner(party)) in config.sources:
        return f'people by "{getattr(config.sources[owner], "id", "") or "id"}"'
    return f"{records} records of {source} at {party}"
