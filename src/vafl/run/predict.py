"""Prediction with a trained model: the server requests embeddings and scores them; no party trains."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import torch
from rich.console import Console
from torch import Tensor, nn

from vafl.arrays import RowIds, States
from vafl.config import Config, read_config
from vafl.data.source_settings import TableSettings
from vafl.errors import ConfigError
from vafl.models.decisions import Decision
from vafl.models.devices import on_device
from vafl.models.store import StoredModel
from vafl.names import LOCAL_CLIENT, check_client, table_owner
from vafl.observe.counting import CountProgress
from vafl.observe.scores import ScoreFile, missing_column
from vafl.privacy.mechanism.client_privacy import protect
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.inquiry import ANSWERED, STATES
from vafl.protocol.messages import ServerMessage
from vafl.protocol.prediction_client import Permutations, PredictionClient
from vafl.protocol.scoring import Scorer
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.protocol.secure_sum.masks import KeyAgreement, KeySigner, NoKeySigner
from vafl.protocol.secure_sum.scoring import ScoringSums
from vafl.protocol.secure_sum.sender import MaskedSender
from vafl.run.agreement import rows_at_once
from vafl.run.assembly import limited_threads
from vafl.run.client import key_signer, run_until_over
from vafl.run.credentials import load_credentials
from vafl.run.ledgers import is_entered, ledger_path, open_ledger
from vafl.run.local import serve_with
from vafl.run.marks import MarkFile, marks_path
from vafl.run.model_store import as_trained, feature_groups, open_model, rebuild
from vafl.run.prediction_driver import Batch, Served
from vafl.run.prediction_records import PredictionRecords, load_records
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.grpc.wire import PROTOCOL, run
from vafl.transport.identity import SERVER


@dataclass(frozen=True)
class Deployed:
    """A trained model at one party, and the records to score.

    Attributes:
        run: the folder of the run that trained the model.
    """

    config: Config
    party: str
    model: StoredModel
    records: PredictionRecords
    run: Path

    @classmethod
    def load(cls, config: Config, party: str, run: Path) -> "Deployed":
        """Read the model and the records to score.

        The model's manifest decides every setting that affects a prediction; see `as_trained`.

        Raises:
            ConfigError, DataError, RunFolderError: a file or a setting cannot be used. Nothing has been sent.
        """
        model = open_model(run, party)
        config = as_trained(config.document(), model, run)
        config.privacy.check_clients(len(model.manifest.parties))
        return cls(config, party, model, load_records(config, party, model), run)

    @property
    def parties(self) -> list[str]:
        return self.model.manifest.parties

    @property
    def classes(self) -> list[str]:
        """The class names; empty if the model predicts a number."""
        return self.model.manifest.classes if self.loss != "squared" else []

    @property
    def loss(self) -> str:
        return self.config.model.loss_for(len(self.model.manifest.classes))

    @property
    def decision(self) -> Decision:
        """How the head's outputs become probabilities and a class."""
        return self.model.manifest.decision

    def terms(self) -> RunTerms:
        """Return this party's view of the settings that all parties must agree on."""
        manifest, config = self.model.manifest, self.config
        return RunTerms(
            protocol=PROTOCOL,
            run_id=config.network.run_id,
            records=self.records.rows,
            record_digest=self.records.digest,
            widths=manifest.widths,
            clients=len(manifest.parties),
            schedule_digest="prediction",
            encoding=config.network.encoding,
            model=f"{manifest.config_digest} of run {manifest.run}",
        )

    def prediction_client(
        self, signer: KeySigner | None = None, *, accept_ledger: bool = False
    ) -> PredictionClient:
        """Create the prediction client, with the same privacy as in training.

        It charges the ledger of the training run, unless privacy.ledger names another folder.

        Args:
            signer: signs the keys of a secure sum.
            accept_ledger: continue if the ledger lacks the last mark that the server received.
        """
        config, records = self.config, self.records
        index = self.parties.index(self.party)
        adds_noise = config.privacy.protection.noises_anything
        module = rebuild(self.model, config.embedding.model)
        module = on_device(module, config.embedding, adds_noise=adds_noise)
        sender = None
        if config.privacy.secure_sum:
            purpose = f"{config.network.run_id}: prediction"
            keys = KeyAgreement(purpose, self.parties, index, signer or NoKeySigner())
            sender = MaskedSender(index, keys)
        path = self._ledger()
        if not is_entered(config, self.party, path):
            permutations = self._permutations()
            return PredictionClient(index, records.features, module, permutations=permutations, sender=sender)
        ledger, accounts = open_ledger(
            config,
            self.party,
            records.ids,
            records.source,
            self.parties,
            run=self.run,
            path=path,
            purpose="prediction",
            accept_ledger=accept_ledger,
        )
        steps = config.rule.local_steps
        private = protect(config.privacy, module, records.features, ledger, accounts, steps)
        columns = private.features.shape[1:] == records.features.shape[1:]
        return PredictionClient(
            index,
            private.features,
            private.model,
            perturb=private.release,
            budget=private.budget,
            permutations=self._permutations(columns=columns),
            sender=sender,
        )

    def _permutations(self, *, columns: bool = True) -> Permutations | None:
        """Return the groups of features that the server may ask this client to permute; None if none.

        Args:
            columns: whether the embedded features still correspond to columns. Some privacy modes replace
                them by released features, which have no column names.
        """
        consent = self.config.prediction.importance
        # A masked client never permutes. The difference between the sums with and without a permutation would
        # reveal that client's embeddings, which the secure sum must hide.
        if consent == "none" or self.config.privacy.secure_sum:
            return None
        source = self.config.sources.get(table_owner(self.party))
        wanted = source.groups if isinstance(source, TableSettings) else {}
        groups = feature_groups(self.model, wanted, each=consent == "columns") if columns else {}
        return Permutations(np.random.default_rng(), groups)  # seeded by the operating system

    def _ledger(self) -> Path:
        """Return the path of the training run's ledger if it exists, else the path in this configuration.

        RUN/config.toml may name existing files. It must not decide where new ones are created, because the
        run folder may come from someone else.
        """
        trained = ledger_path(self._training_config(), self.party, self.run)
        return trained if trained.is_file() else ledger_path(self.config, self.party, self.run)

    def _marks(self) -> Path:
        """Return the path of the server's ledger marks, by the same rule as `_ledger`."""
        trained = marks_path(self._training_config(), self.run)
        return trained if trained.is_file() else marks_path(self.config, self.run)

    def _training_config(self) -> Config:
        """Return the configuration that locates the ledgers and marks of the training run."""
        path = self.run / "config.toml"
        return self.config if self.config.privacy.ledger or not path.is_file() else read_config(path)

    def importance_scorer(self) -> ImportanceScorer:
        """Return the scorer that the server uses for `vafl importance`.

        Raises:
            ConfigError: the model was trained under a secure sum.
        """
        if self.config.privacy.secure_sum:
            raise ConfigError(
                "VFL-7161",
                "importance needs a model that was trained without privacy.secure_sum: the difference "
                "between two sums would reveal one client's embeddings. Found a model that was trained with "
                "it. Train with privacy.secure_sum = false to measure importance.",
            )
        head, defaults, summed, marks = self._scoring()
        return ImportanceScorer(self.records.rows, head, defaults, summed=summed, marks=marks)

    def scorer(self, *, cached: bool) -> Scorer:
        """Return the server's scorer. It uses zeros for a client without a default embedding.

        Args:
            cached: whether to reuse embeddings that clients have sent before.
        """
        head, defaults, summed, marks = self._scoring()
        sums = None
        if self.config.privacy.secure_sum:
            # Nothing can stand in for one client's part of a sum, and no sum is requested twice.
            sums, cached = ScoringSums(len(self.parties), len(defaults[0]), decode), False
            defaults = [torch.zeros_like(default) for default in defaults]
        return Scorer(self.records.rows, head, defaults, summed=summed, cached=cached, marks=marks, sums=sums)

    def _scoring(self) -> tuple[nn.Module, list[Tensor], bool, MarkFile]:
        """Return the head, default embeddings, whether the head takes their sum, and the clients' marks."""
        stored, widths = self.model.defaults, self.model.manifest.widths
        pairs = zip(self.parties, widths, strict=True)
        defaults = [stored.get(party, torch.zeros(width)) for party, width in pairs]
        summed, marks = self.config.model.combine == "sum", MarkFile(self._marks(), self.parties)
        return rebuild(self.model), defaults, summed, marks

    def serve(self, scorer: Scorer, drive: Callable[[Served], list[ServerMessage]]) -> Served:
        """Return the server that exchanges messages with the clients.

        Args:
            drive: called by the server's worker; returns the messages to send next.
        """
        config = self.config
        credentials = load_credentials(config, SERVER)
        return FederationServer(scorer, self.parties, self.terms(), config.network, credentials, drive)

    def table(self, rows: RowIds, outputs: Tensor, states: States) -> pl.DataFrame:
        """Return one row per record: its id, the prediction, and the clients that did not answer for it."""
        columns: dict[str, pl.Series] = {"id": self.records.ids.gather(rows)}
        if self.classes:
            shares = self.decision.probabilities(outputs)
            columns["prediction"] = pl.Series(self.classes, dtype=pl.String).gather(
                self.decision.choose(shares)
            )
            columns |= {f"p({name})": pl.Series(shares[:, m]) for m, name in enumerate(self.classes)}
        else:
            columns["value"] = pl.Series(outputs[:, 0].numpy())
        return pl.DataFrame(columns | {"missing": missing_column(states, self.parties, STATES, ANSWERED)})


def answer(
    config: Config, party: str, run: Path, *, replace: bool = False, accept_ledger: bool = False
) -> str:
    """Answer the server's requests as one client, and return the server's reason for ending.

    Args:
        replace: replace another process of this party that is already connected.
        accept_ledger: continue if the ledger lacks the last mark that the server received.
    """
    deployed = Deployed.load(config, check_client(party), run)
    config = deployed.config
    credentials = load_credentials(config, party)
    client = deployed.prediction_client(key_signer(config, credentials), accept_ledger=accept_ledger)
    federation = FederationClient(
        client, party, deployed.terms(), config.network, credentials, takes_over=replace
    )
    with limited_threads(config.threads):
        return run_until_over(federation)


def local_answers(
    deployed: Deployed, server: Served, *, accept_ledger: bool = False
) -> FederationClient | None:
    """Create the client for the label holder's own features; None if it has no features.

    Args:
        deployed: the model at the server.
        server: the server in this process that sends requests to the client.
        accept_ledger: continue if the client's ledger lacks the last mark that the server received.
    """
    if LOCAL_CLIENT not in deployed.parties:
        return None
    config = deployed.config
    local, credentials = Deployed.load(config, LOCAL_CLIENT, deployed.run), load_credentials(config, SERVER)
    client = local.prediction_client(key_signer(config, credentials), accept_ledger=accept_ledger)
    return FederationClient(
        client, LOCAL_CLIENT, local.terms(), config.network, credentials, connect=server.connect
    )


@dataclass(frozen=True)
class Scored:
    """The result of `predict`.

    Attributes:
        path: the file of scores.
        records: the number of scored records.
        missing: party -> the number of records for which its default embedding was used.
        unscored: rows of the server's table without a score, because the alignment does not include them.
        model_records: data.records of the training run. It decides how unscored rows can get a score.
    """

    path: Path
    records: int
    missing: dict[str, int]
    unscored: int = 0
    model_records: str = "common"


def predict(
    config: Config,
    run_folder: Path,
    out: Path,
    console: Console,
    listening: Callable[[str], None] = lambda address: None,
    *,
    accept_ledger: bool = False,
) -> Scored:
    """Score every record as the server, and write one row for each to `out`.

    Args:
        out: the file of scores, .csv or .parquet.
        listening: called with the server's address once clients can connect.
        accept_ledger: continue if the ledger of the label holder's own client lacks its last mark.

    Raises:
        KeyboardInterrupt: a signal ended the run. No file is left.
    """
    deployed = Deployed.load(config, SERVER, run_folder)
    config = deployed.config
    missing = np.zeros(len(deployed.parties), dtype=np.int64)
    counted = CountProgress(console, "records")
    with ScoreFile(out) as file, limited_threads(config.threads), counted:
        counted.begin(len(deployed.records.chosen))

        def write(rows: RowIds, outputs: Tensor, states: States) -> None:
            file.append(deployed.table(rows, outputs, states))
            missing[:] += (states != ANSWERED).sum(0)
            counted.advance(len(rows))

        chunk = min(config.prediction.chunk, rows_at_once(config, max(deployed.model.manifest.widths)))
        batch = Batch(deployed.records.chosen, replace(config.prediction, chunk=chunk), write)
        federation = deployed.serve(deployed.scorer(cached=False), batch)
        local = local_answers(deployed, federation, accept_ledger=accept_ledger)
        run(_until_scored(federation, local, batch, listening))
        if batch.interrupted:
            raise KeyboardInterrupt
    counts = dict(zip(deployed.parties, missing.tolist(), strict=True))
    return Scored(
        out,
        batch.done,
        {party: count for party, count in counts.items() if count},
        deployed.records.unscored,
        config.data.records,
    )


async def _until_scored(
    federation: Served, local: FederationClient | None, batch: Batch, listening: Callable[[str], None]
) -> None:
    def interrupt() -> None:
        batch.interrupted = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    await serve_with(federation, local, listening)
