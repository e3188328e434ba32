"""A trained model in use: the server asks and scores, clients answer, and no step is made."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import torch
from rich.console import Console
from torch import Tensor

from vafl.build import limited_threads
from vafl.config import Config, read_config
from vafl.federation.client import run_until_over, witness_of
from vafl.federation.credentials import load_credentials
from vafl.federation.local import serve_with
from vafl.federation.marks import MarkFile, marks_path
from vafl.federation.terms import rows_at_once
from vafl.ledgers import is_entered, ledger_path, open_ledger
from vafl.models.folder import StoredModel
from vafl.models.losses import probabilities
from vafl.names import LOCAL_CLIENT, check_client
from vafl.observe.counting import CountProgress
from vafl.observe.scores import ScoreFile, missing_column
from vafl.privacy.fixed_point import decode
from vafl.privacy.guard import guard
from vafl.privacy.secure_sum import KeyAgreement, NoWitness, Witness
from vafl.protocol.masked_scoring import MaskedRespondent, MaskedScorer
from vafl.protocol.messages import ServerMessage
from vafl.protocol.respondent import Respondent
from vafl.protocol.rows import Rows
from vafl.protocol.scoring import ANSWERED, STATES, Scorer
from vafl.runtime.grpc.client import FederationClient
from vafl.runtime.grpc.prediction import Batch, Served, States
from vafl.runtime.grpc.server import FederationServer
from vafl.runtime.grpc.wire import PROTOCOL, Terms, run
from vafl.runtime.identity import SERVER
from vafl.subjects import Subjects, load_subjects
from vafl.trained import open_model, rebuild


@dataclass(frozen=True)
class Deployed:
    """A trained model at one party, and the records it is asked about.

    Attributes:
        run: the folder of the run that trained it.
    """

    config: Config
    party: str
    model: StoredModel
    subjects: Subjects
    run: Path

    @classmethod
    def load(cls, config: Config, party: str, run: Path) -> "Deployed":
        """Checks the model against the configuration, and the records against the model.

        Raises:
            ConfigError, DataError, RunFolderError: before anybody was asked anything.
        """
        model = open_model(config, run, party)
        config.privacy.check_clients(len(model.manifest.parties))
        return cls(config, party, model, load_subjects(config, party, model), run)

    @property
    def parties(self) -> list[str]:
        return self.model.manifest.parties

    @property
    def classes(self) -> list[str]:
        """What probabilities are of; empty if the model gives a number."""
        return self.model.manifest.classes if self.loss != "squared" else []

    @property
    def loss(self) -> str:
        return self.config.model.loss_for(len(self.model.manifest.classes))

    def terms(self) -> Terms:
        """What the parties must agree on, as this one sees it."""
        manifest, config = self.model.manifest, self.config
        return Terms(
            protocol=PROTOCOL,
            run_id=config.network.run_id,
            records=self.subjects.rows,
            record_digest=self.subjects.digest,
            width=config.model.embedding_width(manifest.outputs),
            clients=len(manifest.parties),
            schedule_digest="prediction",
            encoding=config.network.encoding,
            model=f"{manifest.config_digest} of run {manifest.run}",
        )

    def respondent(self, witness: Witness | None = None, *, accept_ledger: bool = False) -> Respondent:
        """Make the client, private if it was private in training.

        It goes on with the ledger of the training, unless privacy.ledger names another folder.

        Args:
            witness: vouches for the keys of a secure sum.
            accept_ledger: go on if the ledger lacks the last mark that the server received.
        """
        config, subjects = self.config, self.subjects
        index = self.parties.index(self.party)
        module = rebuild(self.model, config.model.embedding)
        make: Callable[..., Respondent] = Respondent
        if config.privacy.secure_sum:
            purpose = f"{config.network.run_id}: prediction"
            keys = KeyAgreement(purpose, self.parties, index, witness or NoWitness())
            make = partial(MaskedRespondent, keys=keys)
        path = self._ledger()
        if not is_entered(config, self.party, path):
            return make(index, subjects.features, module)
        ledger, accounts = open_ledger(
            config,
            self.party,
            subjects.ids,
            subjects.source,
            self.parties,
            run=self.run,
            path=path,
            purpose="prediction",
            accept_ledger=accept_ledger,
        )
        steps = config.rule.local_steps
        own = guard(config.privacy, module, subjects.features, ledger, accounts, steps)
        return make(index, own.features, own.model, perturb=own.release, budget=own.budget)

    def _ledger(self) -> Path:
        """Return the ledger of the training if there is one, else where this configuration keeps it.

        RUN/config.toml may name files that exist. It does not decide where new ones are written.
        """
        trained = ledger_path(self._training_config(), self.party, self.run)
        return trained if trained.is_file() else ledger_path(self.config, self.party, self.run)

    def _marks(self) -> Path:
        """Return the file of the server's marks, by the same rule as `_ledger`."""
        trained = marks_path(self._training_config(), self.run)
        return trained if trained.is_file() else marks_path(self.config, self.run)

    def _training_config(self) -> Config:
        """Return the configuration that says where the training kept ledgers and marks."""
        then = self.run / "config.toml"
        return self.config if self.config.privacy.ledger or not then.is_file() else read_config(then)

    def scorer(self, *, cached: bool) -> Scorer:
        """The server's part; where the model has no default for a client, zero stands in."""
        width, head = self.config.model.embedding_width(self.model.manifest.outputs), rebuild(self.model)
        marks = MarkFile(self._marks(), self.parties)
        if self.config.privacy.secure_sum:
            return MaskedScorer(self.subjects.rows, head, len(self.parties), width, decode, marks)
        known, zero = self.model.defaults, torch.zeros(width)
        defaults = torch.stack([known.get(party, zero) for party in self.parties])
        summed = self.config.model.combine == "sum"
        return Scorer(self.subjects.rows, head, defaults, summed=summed, cached=cached, marks=marks)

    def serve(self, scorer: Scorer, drive: Callable[[Served], list[ServerMessage]]) -> Served:
        """The server's end of the network."""
        config = self.config
        credentials = load_credentials(config, SERVER)
        return FederationServer(scorer, self.parties, self.terms(), config.network, credentials, drive)

    def table(self, rows: Rows, outputs: Tensor, states: States) -> pl.DataFrame:
        """One line a record: its id, what the model says, and who did not answer."""
        columns: dict[str, pl.Series] = {"id": self.subjects.ids.gather(rows)}
        if self.classes:
            shares = probabilities(outputs, self.loss).numpy()
            columns["prediction"] = pl.Series(self.classes, dtype=pl.String).gather(shares.argmax(1))
            columns |= {f"p({name})": pl.Series(shares[:, m]) for m, name in enumerate(self.classes)}
        else:
            columns["value"] = pl.Series(outputs[:, 0].numpy())
        return pl.DataFrame(columns | {"missing": missing_column(states, self.parties, STATES, ANSWERED)})


def answer(
    config: Config, party: str, run: Path, *, replace: bool = False, accept_ledger: bool = False
) -> str:
    """A client's part: answers whatever it is asked until the server ends it; gives the server's reason.

    Args:
        replace: take the place of another process of this party that answers already.
        accept_ledger: go on if the ledger lacks the last mark that the server received.
    """
    deployed = Deployed.load(config, check_client(party), run)
    credentials = load_credentials(config, party)
    client = deployed.respondent(witness_of(config, credentials), accept_ledger=accept_ledger)
    federation = FederationClient(
        client, party, deployed.terms(), config.network, credentials, takes_over=replace
    )
    with limited_threads(config.threads):
        return run_until_over(federation)


def local_answers(
    deployed: Deployed, server: Served, *, accept_ledger: bool = False
) -> FederationClient | None:
    """Make the client that answers from the label holder's own table; None if it has no features.

    Args:
        deployed: the server's part of the model.
        server: asks the client, in this process.
        accept_ledger: go on if its ledger lacks the last mark that the server received.
    """
    if LOCAL_CLIENT not in deployed.parties:
        return None
    config = deployed.config
    own, credentials = Deployed.load(config, LOCAL_CLIENT, deployed.run), load_credentials(config, SERVER)
    client = own.respondent(witness_of(config, credentials), accept_ledger=accept_ledger)
    return FederationClient(
        client, LOCAL_CLIENT, own.terms(), config.network, credentials, connect=server.connect
    )


@dataclass(frozen=True)
class Scored:
    """What came of a batch.

    Attributes:
        missing: party -> how many records its default stood in for.
    """

    path: Path
    records: int
    missing: dict[str, int]


def predict(
    config: Config,
    run_folder: Path,
    out: Path,
    console: Console,
    listening: Callable[[str], None] = lambda address: None,
    *,
    accept_ledger: bool = False,
) -> Scored:
    """Score every record and write a line for each: the server's part of a batch.

    Args:
        accept_ledger: go on if the ledger of the label holder's own client lacks its last mark.
    """
    deployed = Deployed.load(config, SERVER, run_folder)
    missing = np.zeros(len(deployed.parties), dtype=np.int64)
    counted = CountProgress(console, "records")
    with ScoreFile(out) as file, limited_threads(config.threads), counted:
        counted.begin(len(deployed.subjects.chosen))

        def write(rows: Rows, outputs: Tensor, states: States) -> None:
            file.append(deployed.table(rows, outputs, states))
            missing[:] += (states != ANSWERED).sum(0)
            counted.advance(len(rows))

        chunk = min(config.prediction.chunk, rows_at_once(config, deployed.terms().width))
        batch = Batch(deployed.subjects.chosen, replace(config.prediction, chunk=chunk), write)
        federation = deployed.serve(deployed.scorer(cached=False), batch)
        local = local_answers(deployed, federation, accept_ledger=accept_ledger)
        run(_until_scored(federation, local, batch, listening))
        if batch.interrupted:
            raise KeyboardInterrupt
    counts = dict(zip(deployed.parties, missing.tolist(), strict=True))
    return Scored(out, batch.done, {party: count for party, count in counts.items() if count})


async def _until_scored(
    federation: Served, local: FederationClient | None, batch: Batch, listening: Callable[[str], None]
) -> None:
    def interrupt() -> None:
        batch.interrupted = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    await serve_with(federation, local, listening)
