"""`vafl check`: check whether a party's files are complete, and show what the others must have.

It opens no connection. It reads the party's data once, to count records and to check their ids.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.config import Config, read_config
from vafl.config.agreement import agreed_digest
from vafl.data.aligned import find_alignments
from vafl.data.settings import LABEL_HOLDER
from vafl.data.sources.opening import open_source
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.models.embeddings import named_factory
from vafl.names import SERVER
from vafl.run.credentials import load_credentials

_DONE, _TODO, _BAD = "ok", "to do", "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that a party needs for a run.

    Attributes:
        party: the party that needs it.
        item: what it is.
        state: `ok`, `to do` (a later step makes it) or `wrong`.
        text: what was found, and the remedy if it is not ok.
    """

    party: str
    item: str
    state: str
    text: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl check`."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(command=check)


def check(options: argparse.Namespace, console: Console) -> None:
    """Check the files of one party, or of all parties in the file, and print what was found.

    Raises:
        ConfigError: something is wrong.
    """
    config = read_config(options.config, overrides(options))
    if config.data.name != "parties":
        raise ConfigError(
            "VFL-9161",
            f'`vafl check` is for data.name = "parties", where each party has its own data. Found '
            f'"{config.data.name}". `vafl run` checks such a configuration before it trains.',
        )
    parties = [config.party] if config.party else list(config.parties)
    findings = [finding for party in parties for finding in _findings(config, party)]
    others = [name for name in (SERVER, *config.data.parties) if name not in parties]
    digest = agreed_digest(config)
    if options.json:
        needed = [{"party": name, "must_have": _needs(config, name, digest)} for name in others]
        document = {"digest": digest, "findings": list(map(asdict, findings)), "others": needed}
        sys.stdout.write(as_json(document))
    else:
        _print(findings, console)
        console.print(f"shared settings: digest {digest}, which every party must show", highlight=False)
        for name in others:
            console.print(f"{name} must have: {'; '.join(_needs(config, name, digest))}", highlight=False)
        if config.party and all(finding.state != _BAD for finding in findings):
            console.print(f"next: {_next(findings, options.config, config.party)}", highlight=False)
    if wrong := [finding for finding in findings if finding.state == _BAD]:
        raise ConfigError(
            "VFL-9162",
            f"every item must be ok or left to a later step. Found {len(wrong)} wrong: "
            f"{', '.join(f'{one.item} of {one.party}' for one in wrong)}. The table says how to repair them.",
        )


def _findings(config: Config, party: str) -> Iterator[Finding]:
    """Yield what one party has and lacks."""
    for item, examine in _ITEMS.items():
        try:
            state, text = examine(config, party)
        except (ConfigError, DataError, RunFolderError) as error:
            state, text = _BAD, str(error)
        yield Finding(party, item, state, text)


def _source(config: Config, party: str) -> tuple[str, str]:
    if party not in config.sources:
        return _BAD, "Found none. Add the section [source] to the party's file."
    source = open_source(config.sources, party)
    records = len(source.ids())
    held = f"{len(source.features)} columns" if source.features else "no features"
    return _DONE, f"{config.sources[party].kind}, {records:,} records, {held}"


def _labels(config: Config, party: str) -> tuple[str, str]:
    if party != LABEL_HOLDER:
        return _DONE, "none, because only the server has labels"
    table = config.holder_table
    if table is None or not table.label:
        return _BAD, "Found no label column. Set label in the server's source; predictions do not need it."
    return _DONE, f'column "{table.label}", for a {config.data.task}'


def _embedding(config: Config, party: str) -> tuple[str, str]:
    own = config.of(party).embedding
    if party == LABEL_HOLDER and not open_source(config.sources, party).features:
        return _DONE, "none, because the label holder has no features"
    if own.has_factory:
        named_factory(own.model)
    if own.weights and not Path(own.weights).is_file():
        return _BAD, f'embedding.weights must be a file. Found no file "{own.weights}". Correct the path.'
    widths = config.model.width
    width = widths.get(party, 0) if isinstance(widths, dict) else widths
    return _DONE, f"{own.model}, width {width or 'by default'}, trains {own.train}, on {own.device}"


def _alignment(config: Config, party: str) -> tuple[str, str]:
    path = Path(config.sources[party].alignment)
    if not path.is_file():
        return _TODO, f'no file "{path}" yet. `vafl align` writes it.'
    alignment = find_alignments(config.data, config.sources, party)[party]
    return _DONE, f"{len(alignment.ids):,} of {alignment.rows:,} rows"


def _certificates(config: Config, party: str) -> tuple[str, str]:
    network = config.network
    if network.security == "plaintext":
        return _DONE, 'none, because network.security = "plaintext"'
    if not network.certificates or not Path(network.certificates).exists():
        return _TODO, f'no folder "{network.certificates}" yet. Get it from the party that ran `vafl certs`.'
    load_credentials(config, party)
    return _DONE, f'for {party}, in "{network.certificates}"'


def _privacy(config: Config, party: str) -> tuple[str, str]:
    settings = config.of(party).privacy
    if not settings.protection.noises_anything:
        return _DONE, "no noise: embeddings reveal features to the server"
    budget = "no budget" if settings.mu_max is None else f"budget mu {settings.mu_max}"
    return _DONE, f"{settings.kind}, {budget}"


_ITEMS: dict[str, Callable[[Config, str], tuple[str, str]]] = {
    "source": _source,
    "labels": _labels,
    "embedding": _embedding,
    "alignment": _alignment,
    "certificates": _certificates,
    "privacy": _privacy,
}


def _needs(config: Config, party: str, digest: str) -> list[str]:
    """Return what another party needs for a run with this one."""
    needs = [f"the same shared file (digest {digest})", "a source with the same ids"]
    if party == SERVER:
        needs[1] = "a table with the same ids and the labels"
    if isinstance(config.model.width, dict) and party in config.model.width:
        needs.append(f"embeddings of width {config.model.width[party]}")
    if config.network.security != "plaintext":
        needs.append("a certificate of the same authority")
    return needs


def _next(findings: list[Finding], path: Path, party: str) -> str:
    """Return the next command of this party."""
    todo = {finding.item for finding in findings if finding.state == _TODO}
    if "certificates" in todo:
        return "get this party's certificates (`vafl certs`), then check again"
    if "alignment" in todo:
        return f"vafl align {path}"
    return f"vafl {'server' if party == SERVER else 'client'} {path}"


def _print(findings: list[Finding], console: Console) -> None:
    grid = Grid("party", "item", "state", "", box=None)
    styles = {_DONE: "green", _TODO: "yellow", _BAD: "bold red"}
    for finding in findings:
        state = Text(finding.state, styles[finding.state])
        grid.add_row(Text(finding.party), finding.item, state, Text(finding.text))
    console.print(grid)
