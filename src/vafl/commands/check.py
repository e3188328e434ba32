"""`vafl check`: check whether a party's files are complete, and show what the others must have.

It opens no connection. It reads the party's data, checks ids and labels, fits the encoder and makes the
party's first model. So it finds what would stop the party's commands later, as far as one party can know it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text
from torch import nn

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.commands.data import fitted_encoder
from vafl.config import Config, read_config
from vafl.config.agreement import agreed_digest
from vafl.data.aligned import find_alignments
from vafl.data.alignment.rows import Alignment
from vafl.data.labels import label_classes, read_labels
from vafl.data.settings import LABEL_HOLDER
from vafl.data.sources.opening import open_source
from vafl.data.tables import POSITION, open_table
from vafl.errors import ConfigError, DataError, VaflError
from vafl.names import LOCAL_CLIENT, SERVER
from vafl.privacy.mechanism.layers import require_separate_records
from vafl.run.credentials import load_credentials
from vafl.run.ledgers import is_entered, ledger_path
from vafl.run.plan import check_public, first_model

_DONE, _TODO, _BAD = "ok", "to do", "wrong"
_SHOWN = 5  # classes in a finding
State = tuple[str, str]  # the state of an item, and what was found


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
    everyone = (SERVER, *config.data.parties)
    parties = [config.party] if config.party else [name for name in everyone if name in config.parties]
    if not parties:
        raise ConfigError(
            "VFL-9164",
            f'"{options.config}" must describe a party. Found no section [parties.NAME]. Check the file of a '
            "party (party.toml), which names this one as its federation.",
        )
    findings = [finding for party in parties for finding in _findings(config, party)]
    needs = {name: _needs(config, name) for name in everyone if name not in parties}
    digest, following = agreed_digest(config), _next(findings, options.config, config, complete=not needs)
    if options.json:
        others = [{"party": name, "must_have": needed} for name, needed in needs.items()]
        document = {"digest": digest, "findings": list(map(asdict, findings)), "others": others}
        sys.stdout.write(as_json({**document, "next": following}))
    else:
        _print(findings, console)
        console.print(f"shared settings: digest {digest}, which every party must show", highlight=False)
        for name, needed in needs.items():
            console.print(f"{name} must have: {'; '.join(needed)}", highlight=False, markup=False)
        if following:
            console.print(f"next: {following}", highlight=False, markup=False)
    if wrong := [finding for finding in findings if finding.state == _BAD]:
        raise ConfigError(
            "VFL-9162",
            f"every item must be ok or left to a later step. Found {len(wrong)} wrong: "
            f"{', '.join(f'{one.item} of {one.party}' for one in wrong)}. The table says how to repair them.",
        )


def _findings(config: Config, party: str) -> Iterator[Finding]:
    """Yield what one party has and lacks."""
    for item, examine in _ITEMS.items():
        if party not in config.sources and item in _OF_DATA:
            continue  # the source is reported as missing
        try:
            state, text = examine(config, party)
        except VaflError as error:
            state, text = _BAD, str(error)
        except OSError as error:
            state, text = _BAD, f'cannot read "{error.filename}": {error.strerror}.'
        yield Finding(party, item, state, text)


def _source(config: Config, party: str) -> State:
    if party not in config.sources:
        return _BAD, "Found none. Add the section [source] to the party's file."
    source = open_source(config.sources, party)
    records = len(source.ids())
    if not records:
        return _BAD, f'Found no records in "{source.location}". Add records, or correct the path.'
    columns = [name for name in source.features if not name.startswith("(")]  # pixels have no names
    held = f", {len(columns)} feature columns" if columns else "" if source.features else ", no features"
    return _DONE, f"{config.sources[party].kind}, {records:,} records{held}"


def _labels(config: Config, party: str) -> State:
    if party != LABEL_HOLDER:
        return _DONE, "none, because only the server has labels"
    holder = config.holder_table
    if holder is None or not holder.label:
        return _BAD, "Found no label column. Set label in the server's source; predictions do not need it."
    table = open_table(config.sources, LABEL_HOLDER)
    classes, ids = label_classes(table, config.data.task), table.ids()
    labels = read_labels(table, pl.DataFrame({"id": ids, POSITION: np.arange(len(ids))}), classes)
    if classes is None:
        return _DONE, f'column "{holder.label}", numbers from {labels.min():.4g} to {labels.max():.4g}'
    shown = ", ".join(classes[:_SHOWN]) + (", ..." if len(classes) > _SHOWN else "")
    return _DONE, f'column "{holder.label}", {len(classes)} classes: {shown}'


def _embedding(config: Config, party: str) -> State:
    if not _has_features(config, party):
        return _DONE, "none, because the label holder has no features"
    own, name = config.of(party).embedding, LOCAL_CLIENT if party == LABEL_HOLDER else party
    alignment = _found_alignment(config, party)
    encoder = fitted_encoder(config, party, alignment)
    width = _checked_width(config, name, alignment)
    model = first_model(config, name, encoder.shape, encoder, width)
    if config.privacy.protection.guaranteed:
        require_separate_records(model, torch.randn(4, *encoder.shape))
    size = f"{_count(model):,} parameters"
    trained = "all trained" if own.train == "all" else f"{_count(model, trained=True):,} trained"
    shape = " x ".join(map(str, encoder.record_shape))
    known = width if alignment or config.model.head != "bias" else "the outputs"
    return _DONE, f"{own.model}, {shape} -> {known}, {size}, {trained}, on {_device(model)}"


def _checked_width(config: Config, name: str, alignment: Alignment | None) -> int:
    """Return the width of a client's embedding, after a check that all widths fit the head.

    Without an alignment, a client does not know the classes, nor whether the label holder has features.

    Raises:
        ConfigError: the widths do not fit.
    """
    model = config.model
    if alignment is None:
        outputs = model.width if isinstance(model.width, int) and model.width else 1
        with_local = name == LOCAL_CLIENT or (isinstance(model.width, dict) and LABEL_HOLDER in model.width)
    else:
        outputs, with_local = model.outputs_for(len(alignment.classes or ())), alignment.with_local
    clients = [*config.data.parties, *([LOCAL_CLIENT] if with_local else [])]
    return model.widths(clients, outputs)[clients.index(name)]


def _count(model: nn.Module, *, trained: bool = False) -> int:
    return sum(value.numel() for value in model.parameters() if value.requires_grad or not trained)


def _device(model: nn.Module) -> str:
    return next((str(value.device) for value in model.parameters()), "cpu")


def _has_features(config: Config, party: str) -> bool:
    return party != LABEL_HOLDER or bool(open_source(config.sources, party).features)


def _found_alignment(config: Config, party: str) -> Alignment | None:
    """Return a party's alignment; None if `vafl align` has not written it."""
    if not Path(config.sources[party].alignment).is_file():
        return None
    return find_alignments(config.data, config.sources, party)[party]


def _alignment(config: Config, party: str) -> State:
    alignment, path = _found_alignment(config, party), config.sources[party].alignment
    if alignment is None:
        return _TODO, f'no file "{path}" yet. `vafl align` writes it.'
    lost = len(alignment.ids) - int(
        alignment.ids.is_in(open_source(config.sources, party).ids().implode()).sum()
    )
    if lost:
        raise DataError(
            "VFL-9163",
            f'the source must have the {len(alignment.ids):,} records in "{path}". Found that {lost:,} are '
            "gone. Run `vafl align` again at every party.",
        )
    return _DONE, f"{len(alignment.ids):,} of {alignment.rows:,} rows"


def _certificates(config: Config, party: str) -> State:
    network = config.network
    if network.security == "plaintext":
        return _DONE, 'none, because network.security = "plaintext"'
    if not network.certificates:
        return _TODO, "network.certificates is not set. `vafl certs` makes the folder of each party."
    if not Path(network.certificates).exists():
        return _TODO, f'no folder "{network.certificates}" yet. Get it from the party that ran `vafl certs`.'
    load_credentials(config, party)
    return _DONE, f'for {party}, in "{network.certificates}"'


def _privacy(config: Config, party: str) -> State:
    if not _has_features(config, party):
        return _DONE, "none, because the label holder has no features"
    own, name = config.of(party), LOCAL_CLIENT if party == LABEL_HOLDER else party
    check_public(own, is_table=True)
    is_entered(own, name, ledger_path(own, name, Path()))
    settings = own.privacy
    if not settings.protection.noises_anything:
        return _DONE, "no noise: embeddings reveal features to the server"
    budget = "no budget" if settings.mu_max is None else f"budget mu {settings.mu_max}"
    return _DONE, f"{settings.kind}, {budget}"


_ITEMS: dict[str, Callable[[Config, str], State]] = {
    "source": _source,
    "labels": _labels,
    "embedding": _embedding,
    "alignment": _alignment,
    "certificates": _certificates,
    "privacy": _privacy,
}
_OF_DATA = ("labels", "embedding", "alignment", "privacy")  # items that need a source


def _needs(config: Config, party: str) -> list[str]:
    """Return what another party needs for a run with this one."""
    needs = ["the same shared settings (the digest)"]
    if party == SERVER:
        needs.append("a table with the same ids and the labels")
    else:
        needs += ["a source with the same ids", f"embeddings of {_width(config, party)}"]
        if config.privacy.secure_sum:
            needs.append('embedding.model = "linear"')
        if config.privacy.protection.guaranteed:
            needs.append("privacy.mu_max, the budget of its records")
        needs.append("the server's address as network.address")
    if config.network.security != "plaintext":
        needs.append("a certificate of the same authority")
    return needs


def _width(config: Config, party: str) -> str:
    """Return the width of a party's embedding, in words."""
    if config.model.head == "bias":
        return "the width of the outputs"
    return f"width {config.model.width_of(party, 0)}"


def _next(findings: Sequence[Finding], path: Path, config: Config, *, complete: bool) -> str:
    """Return the next command; empty if something is wrong.

    Args:
        complete: whether the configuration describes all parties.
    """
    if any(finding.state == _BAD for finding in findings):
        return ""
    if complete:
        return f"vafl run {path}"  # it joins the records itself, and needs no certificates
    todo = {finding.item for finding in findings if finding.state == _TODO}
    if "certificates" in todo:
        return "get this party's certificates (`vafl certs`), then check again"
    party = f" --party {findings[0].party}" if findings and not config.party else ""
    if "alignment" in todo:
        return f"vafl align {path}{party}"
    is_server = bool(findings) and findings[0].party == SERVER
    return f"vafl server {path}" if is_server else f"vafl client {path}{party}"


def _print(findings: Sequence[Finding], console: Console) -> None:
    grid = Grid("party", "item", "state", "", box=None)
    styles = {_DONE: "green", _TODO: "yellow", _BAD: "bold red"}
    for finding in findings:
        state = Text(finding.state, styles[finding.state])
        grid.add_row(Text(finding.party), finding.item, state, Text(finding.text))
    console.print(grid)
