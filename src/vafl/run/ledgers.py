"""Where each party's privacy ledger lies, and which of its accounts the rows of a run are."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import polars as pl

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.names import LOCAL_CLIENT, table_owner
from vafl.observe.record import LEDGERS, SIMULATED_LEDGERS
from vafl.privacy.ledger.accounts import NOBODY, Numbers
from vafl.privacy.ledger.journal import has_journal
from vafl.privacy.ledger.ledger import Ledger, read_ledger
from vafl.privacy.ledger.spender import Spender

if TYPE_CHECKING:
    from vafl.privacy.ledger.statement import Statement

log = logging.getLogger(__name__)


def ledger_path(config: Config, party: str, run: Path) -> Path:
    """Accounts of people lie beside the table they are in: they outlive any run and any alignment."""
    name = f"{party}.ledger"
    if config.privacy.ledger:
        return Path(config.privacy.ledger) / name
    if (owner := table_owner(party)) in config.tables:
        return Path(config.tables[owner].path).parent / name
    return run / LEDGERS / name


def find_ledgers(config: Config, run: Path) -> list[Path]:
    """Return the ledgers that a run's parties have on this machine."""
    if config.tables:
        paths = [ledger_path(config, party, run) for party in (*config.tables, LOCAL_CLIENT)]
    else:
        paths = list(Path(config.privacy.ledger or run / LEDGERS).glob("*.ledger"))
    return sorted(path for path in paths if has_journal(path))


def run_ledgers(config: Config, run: Path) -> list[Path]:
    """Return the ledgers that tell what a run has spent: those of its simulation, or its parties' own."""
    return sorted((run / SIMULATED_LEDGERS).glob("*.ledger")) or find_ledgers(config, run)


def read_statements(config: Config, run: Path) -> list["Statement"]:
    """Return the accounts of every ledger of a run that is on this machine; none if it was not private."""
    if config.privacy.kind == "none":
        return []
    found = [(path, read_ledger(path)) for path in run_ledgers(config, run)]
    return [make_statement(path, ledger, config) for path, ledger in found if ledger.spenders]


def make_statement(path: Path, ledger: Ledger, config: Config) -> "Statement":
    """Return the account of a party's ledger by the settings of a run."""
    from vafl.privacy.ledger.statement import Statement  # noqa: PLC0415 - loads scipy, which no client needs

    return Statement(path.stem, ledger, config.privacy, config.schedule.batch_size, config.rule.local_steps)


def is_entered(config: Config, party: str, path: Path | None) -> bool:
    """Whether what a party sends is entered in its ledger: if the mode has costs, and in any mode where
    there is a ledger already, for one that showed less than was sent would be believed.

    Args:
        path: where the ledger is, if it is there; None in a simulation.

    Raises:
        ConfigError: people whom a ledger counts would go without protection, and nobody has said so.
    """
    if config.privacy.kind != "none":
        return True
    if path is None or not has_journal(path):
        return False
    if config.privacy.mode == "auto":
        raise ConfigError(
            "VFL-7111",
            f'the people of {party} have a privacy ledger, "{path}", so a run must say how it protects them. '
            f'Found privacy.mode = "auto" and no noise. Name a mode; privacy.mode = "none" sends their '
            "embeddings as they are, and the ledger will show each of those people as unbounded, for ever.",
        )
    log.warning('privacy.mode none: everybody whose embedding leaves is entered in "%s" as unbounded', path)
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
) -> tuple[Ledger, Numbers]:
    """A party's ledger, and [rows] the account of each row.

    Args:
        ids: [rows], the party's own; null for records it lacks.
        source: what the records are a part of, if numbers are all they are called.
        run: the folder of the run that will spend; None is a simulation, which sends nothing and whose
            ledger is kept in memory.
        path: the ledger's file, if not where `ledger_path` says.
        accept_ledger: go on if the ledger lacks the last mark that the server received.
    """
    if run is not None:
        path = path or ledger_path(config, party, run)
    ledger = Ledger(path, _identity(config, party, source, len(ids)), accepts_mark=accept_ledger)
    begins = not ledger.spenders
    folder = "" if run is None else str(run.resolve())
    batch, steps = config.schedule.batch_size, config.rule.local_steps
    spender = Spender(folder, purpose, tuple(parties), config.privacy, batch, steps)
    accounts = ledger.begin(spender, ids)
    if path is not None:
        people = accounts[accounts != NOBODY]
        most = math.sqrt(float(ledger.spent[people].max(initial=0.0)))
        log.info(
            'privacy ledger "%s" %s: up to mu %.4g is spent on the %d people of this run',
            path,
            "begins" if begins else "goes on",
            most,
            len(people),
        )
    return ledger, accounts


def _identity(config: Config, party: str, source: str, records: int) -> str:
    """Return a text that tells which kind of ids a ledger's accounts have.

    Ids of a table name people in every run. Record numbers name records of one data set of one size.
    """
    if (owner := table_owner(party)) in config.tables:
        return f'people by "{config.tables[owner].id}"'
    return f"{records} records of {source} at {party}"
