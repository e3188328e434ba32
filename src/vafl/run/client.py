"""A client's part of a run: its features, its durable state and its connection to the server."""

import asyncio
import logging
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from vafl.config import Config
from vafl.errors import DataError, Diverged, RemoteFault, RunFolderError
from vafl.files import make_private_folder, remove_drafts, write_atomically
from vafl.folders import HeldFolder
from vafl.names import check_client
from vafl.observe.client_progress import ClientProgress, ClientView
from vafl.protocol.client import Client
from vafl.run.agreement import STATE, make_terms, over_network, require_same_run, rows_at_once
from vafl.run.assembly import limited_threads, make_client, make_privacy, widths
from vafl.run.best import BestEmbedding
from vafl.run.checkpoint import (
    flatten,
    has_checkpoint,
    load_checkpoint,
    load_facts,
    restoring,
    save_checkpoint,
    unflatten,
)
from vafl.run.continued import beginning_of, keep_encoder
from vafl.run.credentials import load_credentials
from vafl.run.model_store import keep_embedding, run_name
from vafl.run.plan import Plan, make_plan
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.local import LocalCall, Metadata
from vafl.transport.grpc.refresh_time import MeasuredTime
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER, CertificateSigner, Credentials

log = logging.getLogger("vafl.client")


class ClientState:
    """A client's durable state: its model, its optimiser and its position in the run.

    Args:
        every: activations between two checkpoints.
        terms: the run's agreement. A resumed run compares its own agreement with it.
        private_seed: the seed of a private schedule; None if the schedule uses the run's seed.
    """

    def __init__(
        self,
        client: Client,
        folder: Path,
        every: int,
        terms: RunTerms,
        *,
        resume: bool,
        private_seed: int | None = None,
    ) -> None:
        self._client, self._folder, self._every = client, folder, every
        self._terms, self._private_seed = terms, private_seed
        if resume:
            self._restore()
        else:
            self.save()  # a client that is killed at any time from here on can be resumed
        self._saved, self._iteration = client.activation, client.iteration

    def _restore(self) -> None:
        client = self._client
        tensors, facts = load_checkpoint(self._folder)
        with restoring(self._folder):
            client.load({name: tensors[f"model.{name}"] for name in client.model.state_dict()})
            optimiser = unflatten(facts["optimiser"], tensors)
            client.restore(facts["activation"], facts["iteration"], optimiser, run=facts["run"])

    def save_if_due(self) -> None:
        """Save if enough activations have passed, or if the server has returned to an older checkpoint."""
        client = self._client
        # A restored server counts the same iteration numbers a second time. Save before the client sends
        # anything, so that the iteration in the checkpoint never refers to one that the server has lost.
        if client.iteration < self._iteration or client.activation - self._saved >= self._every:
            self.save()

    def save(self) -> None:
        """Make the model and the client's place in the run durable.

        Raises:
            Diverged: the model has a NaN or infinite parameter. The previous checkpoint stays.
        """
        client = self._client
        self._saved, self._iteration = client.activation, client.iteration
        tensors, optimiser = flatten("optimiser", client.descent.state())
        tensors |= {f"model.{name}": tensor for name, tensor in client.model.state_dict().items()}
        facts = {
            "terms": asdict(self._terms),
            "run": client.run,
            "activation": client.applied,
            "iteration": client.iteration,
            "optimiser": optimiser,
            "own_seed": self._private_seed,
        }
        buffers = {f"model.{name}" for name, _ in client.model.named_buffers()}
        save_checkpoint(self._folder, tensors, facts, buffers)


def draw_seed(config: Config, folder: Path, *, resume: bool) -> int | None:
    """Return a secret seed for a private schedule; None if the schedule uses the run's seed.

    A resumed client reads the seed from its checkpoint, so that its schedule continues.
    """
    if config.schedule.seed == "shared":
        return None
    if resume:
        private_seed: int = load_facts(folder)["own_seed"]
        return private_seed
    return secrets.randbits(128)


def run_client(
    config: Config,
    party: str,
    path: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    replace: bool = False,
    accept_ledger: bool = False,
    console: Console | None = None,
    earlier: Path | None = None,
    joins: bool = False,
) -> str:
    """Take part in a run as one client and return the server's reason for ending it.

    Write path/state/PARTY during the run and path/models/PARTY at the end. Write path/config.toml unless a
    server on this machine has done so. If the server rejects the client, remove these files but keep the
    privacy ledger: the client can then try again without --resume or --overwrite.

    Args:
        replace: replace another process of this party that is already connected.
        accept_ledger: continue if the ledger lacks the last mark that the server received.
        console: where to show progress; None shows nothing.
        earlier: the folder of a run whose model this client starts with.
        joins: whether this client joins parties that start from an earlier run, which it was not in.
    """
    folder = path / STATE / check_client(party)
    if not (resume or overwrite) and has_checkpoint(folder) and load_facts(folder)["activation"] > 0:
        raise RunFolderError(
            "VFL-7041",
            f'a new run needs a state folder without a checkpoint. "{folder}" holds a checkpoint of {party}. '
            "Add --resume to continue from it, or --overwrite to discard it and start again.",
        )
    config = over_network(config)
    beginning = beginning_of(config, path, earlier, party=party, joins=joins, resume=resume)
    plan = make_plan(config, party=party, beginning=beginning)
    names = [each.name for each in plan.data.parties]
    if party not in names:
        raise DataError(
            "VFL-7042",
            f'--party must name a client of this run: {", ".join(names)}. Found "{party}".',
        )
    credentials, terms = load_credentials(config, party), make_terms(plan)
    if resume:
        require_same_run(folder, terms)
    written = _Written(path, folder)
    make_private_folder(path / STATE)
    with HeldFolder(folder):
        if not resume:
            keep_encoder(folder, plan.data.parties[names.index(party)].encoder if earlier else None)
        client = ClientRun(
            plan,
            party,
            path,
            terms,
            credentials,
            resume=resume,
            takes_over=resume or replace,
            accept_ledger=accept_ledger,
        )
        if not (path / "config.toml").exists() or not (resume or (path / STATE / SERVER).is_dir()):
            write_atomically(path / "config.toml", plan.config.to_toml().encode())
        progress = ClientProgress(console or Console(quiet=True), folder, client.view)
        try:
            with limited_threads(config.threads), client.saved(), progress:
                return run_until_over(client.federation)
        except RemoteFault:
            if not client.federation.welcomed:
                written.remove(plan.config.to_toml().encode())
            raise


class _Written:
    """The files and folders that a client creates before the server accepts it.

    Construct it before the client writes anything: `remove` never removes what exists at that time.

    Args:
        path: the run folder.
        folder: the client's state folder in it.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._folder, self._config = folder, path / "config.toml"
        self._made_state, self._made_config = not folder.exists(), not self._config.exists()
        self._parents = [parent for parent in (folder.parent, path, *path.parents) if not parent.exists()]

    def remove(self, config: bytes) -> None:
        """Remove everything that this client created.

        Another party may use the same run folder. Its files stay, and so do the folders that contain them.

        Args:
            config: the content of config.toml, if this client wrote it.
        """
        if self._made_state:
            shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            if self._made_config and self._config.read_bytes() == config and not self._is_shared():
                self._config.unlink()
        for parent in self._parents:
            with suppress(OSError):  # keep a folder that is not empty
                parent.rmdir()

    def _is_shared(self) -> bool:
        """Return whether another party keeps its state in this run folder."""
        state = self._folder.parent
        return any(entry != self._folder for entry in state.iterdir()) if state.is_dir() else False


class ClientRun:
    """One client of a run: the protocol's client, its durable state and its connection to the server.

    Args:
        path: the run folder.
        resume: continue from the checkpoint in path/state/PARTY.
        takes_over: whether it may replace another process of this party.
        accept_ledger: continue if the ledger lacks the last mark that the server received.
        connect, may_wake: as for `FederationClient`.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        path: Path,
        terms: RunTerms,
        credentials: Credentials | None,
        *,
        resume: bool,
        takes_over: bool,
        accept_ledger: bool = False,
        connect: Callable[[Metadata], LocalCall] | None = None,
        may_wake: Callable[[Client], bool] = lambda client: True,
    ) -> None:
        config, names, folder = plan.config, [each.name for each in plan.data.parties], path / STATE / party
        index = names.index(party)
        remove_drafts(folder)
        privacy = make_privacy(plan, index, path, accept_ledger=accept_ledger)
        private_seed, signer = draw_seed(config, folder, resume=resume), key_signer(config, credentials)
        # Before ClientState writes its first checkpoint: a new run first removes the best model of an older
        # run, so that a crash between the two cannot leave that model behind to be resumed.
        self._best = BestEmbedding(folder, resume=resume)
        client = make_client(
            plan,
            index,
            privacy=privacy,
            with_held_out=True,
            signer=signer,
            private_seed=private_seed,
            refresh_rows=rows_at_once(config, widths(plan)[index]),
            refresh_time=MeasuredTime(config.schedule.batch_size),
            at_evaluation=self._best,
        )
        every = config.network.checkpoint_every
        self._state = ClientState(client, folder, every, terms, resume=resume, private_seed=private_seed)
        self._plan, self._index, self._path, self._client = plan, index, path, client
        sleeper = config.delays.clock(len(names), config.seed)[index] if config.network.real_delays else None
        self.federation = FederationClient(
            client,
            party,
            terms,
            config.network,
            credentials,
            sleeper,
            self._state.save_if_due,
            takes_over=takes_over,
            connect=connect,
            may_wake=lambda: may_wake(client),
        )

    def view(self) -> ClientView:
        """Return the client's progress. None of its values depends on the labels."""
        client, federation, config = self._client, self.federation, self._plan.config
        return ClientView(
            party=federation.party,
            connected=federation.is_connected,
            uploads=client.activation,
            epochs=client.activation * config.schedule.batch_size / self._plan.data.rows,
            updates=client.latest + 1,
            most_updates=config.stop.updates,
            delay_mean=client.staleness.mean,
            delay_max=client.staleness.largest,
            bytes_up=federation.bytes_up,
            bytes_down=federation.bytes_down,
            finished=client.finished,
        )

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Save a checkpoint when the block ends, and the trained model if the server ended the run."""
        try:
            yield
            if self.federation.ended and self._plan.config.stop.patience:
                self._best.restore(self._client)
        except Diverged:
            raise  # the previous checkpoint is the last one with finite parameters
        except BaseException:
            with suppress(Diverged):
                self._state.save()
            raise
        self._state.save()
        if self.federation.ended:
            keep_embedding(self._plan, self._index, self._path, run_name(self._client.run))


def key_signer(config: Config, credentials: Credentials | None) -> CertificateSigner | None:
    """Return the signer of this party's secure-sum keys; None if it has no certificate to sign them with."""
    if credentials is not None:
        return CertificateSigner(credentials)
    if config.privacy.secure_sum:
        log.warning("secure sum without certificates: the keys that the server relays are not signed")
    return None


def run_until_over(federation: FederationClient) -> str:
    """Run the client in an event loop and return the server's reason for ending the run.

    SIGINT and SIGTERM stop the client after its current turn. Further signals have no effect.

    Raises:
        KeyboardInterrupt: a signal stopped the client.
    """
    reasons: list[str] = []

    async def main() -> None:
        task = asyncio.ensure_future(federation.run())

        def end() -> None:
            # The cancelled task waits for the turn to finish. A second cancellation would abort that wait.
            if not task.cancelling():
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
        try:
            reasons.append(await task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    run(main())
    return reasons[0]
