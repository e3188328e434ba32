"""Start a run from the models of an earlier one (`--from RUN`).

The records may be new, a party's network may have changed, and a party may have joined. What fits is kept:

    a client's model and encoder    if its network, its width and the form of its features are as before
    the head                        if its kind and the classes are as before; the columns of its input layers
                                    follow their party, and those of a new or changed party start at 0

With zeros in these columns, a new party does not change the outputs until the head has learnt to use it.
Everything else starts as in any run: optimisers, schedules, the embedding table and the split of the records.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from vafl.config import Config
from vafl.data.sources.base import RecordEncoder, encoder_from_dict
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.files import make_private_folder, write_atomically
from vafl.models.heads import input_layers, make_head
from vafl.models.settings import ModelSettings
from vafl.models.store import MANIFEST, StoredModel, read_model
from vafl.names import SERVER
from vafl.run.agreement import STATE
from vafl.run.assembly import widths
from vafl.run.model_store import model_folder
from vafl.run.plan import Plan, encoder_of, form_for

log = logging.getLogger("vafl.model")

_ENCODER = "encoder.json"  # in a party's state folder: its encoder, if it is that of an earlier run


class EarlierRun:
    """The trained models of an earlier run, for the parties whose models are in the folder.

    Args:
        path: the run folder of the earlier run.
        config: the configuration of the new run.

    Raises:
        RunFolderError: the folder has no models, or a model is damaged.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self._path, self._config = path, config
        self._told: set[str] = set()
        if not any((path / "models").glob(f"*/{MANIFEST}")):
            raise RunFolderError(
                "VFL-7221",
                f'--from needs the folder of a finished run with trained models. Found none in "{path}". '
                "Name another folder, or start without --from.",
            )

    def encoder(self, party: str) -> RecordEncoder | None:
        """Return the encoder of a party whose model is kept; None if the party needs a new one."""
        stored = self._embedding(party)
        return None if stored is None else encoder_of(stored)

    def carry_over(self, plan: Plan, party: str | None) -> None:
        """Copy the earlier models into those of the plan.

        Args:
            party: the party of this process; None in a simulation, which has all models.

        Raises:
            RunFolderError: a model does not have the features or the classes of the new run.
        """
        for index, each in enumerate(plan.data.parties):
            stored = self._embedding(each.name) if each.features.numel() else None
            if stored is not None:
                stored.require({"features": list(each.features.shape[1:])})
                stored.load_into(plan.models[index])
                log.info('%s continues with its model in "%s"', each.name, self._path)
        if party in (None, SERVER):
            self._carry_head(plan)

    def _embedding(self, party: str) -> StoredModel | None:
        """Return a client's earlier model if the new run can keep it."""
        stored = self._stored(party)
        if stored is None:
            return None
        if why := self._unfit(stored):
            self._tell(party, why)
            return None
        return stored

    def _stored(self, party: str) -> StoredModel | None:
        folder = model_folder(self._path, party)
        if not (folder / MANIFEST).is_file():
            self._tell(party, f'"{self._path}" has no model of it')
            return None
        return read_model(folder)

    def _unfit(self, stored: StoredModel) -> str:
        """Return why the new run cannot keep a client's model; empty if it can."""
        manifest, config = stored.manifest, self._config.of(stored.manifest.party)
        own = {"model": config.embedding.model, "hidden": list(config.embedding.hidden)}
        if own != manifest.embedding:
            return f"its network was {manifest.embedding} and is {own}"
        width = manifest.widths[manifest.parties.index(manifest.party)]
        settings = config.model.width
        chosen = settings.get(manifest.party, 0) if isinstance(settings, dict) else settings
        if chosen not in (0, width):
            return f"its embeddings were {width} wide and are {chosen}"
        encoder = encoder_of(stored)
        if encoder is not None and encoder.flags_absent != (config.data.records == "labelled"):
            return "data.records has changed"
        form = getattr(encoder, "form", None)
        if form is not None and form != form_for(self._config, manifest.party):
            return "the form of its features has changed"
        return ""

    def _carry_head(self, plan: Plan) -> None:
        stored = self._stored(SERVER)
        if stored is None:
            return
        stored.require({"classes": list(plan.data.classes or ()), "outputs": plan.task.outputs})
        was, now = stored.settings, plan.config.model
        if (was.head, was.head_hidden, was.combine) != (now.head, now.head_hidden, now.combine):
            self._tell(SERVER, f"its head was {was.head} and is {now.head}, or their sizes differ")
            return
        earlier = make_head(_settings_of(stored), stored.manifest.widths, stored.manifest.outputs)
        stored.load_into(earlier)
        kept = [
            each.name
            for each in plan.data.parties
            if each.name in stored.manifest.parties and self._is_kept(each.name)
        ]
        names = [each.name for each in plan.data.parties]
        if now.combine == "sum":
            plan.head.load_state_dict(earlier.state_dict())
            return
        copy_head(
            earlier,
            plan.head,
            _columns(stored.manifest.parties, stored.manifest.widths),
            _columns(names, widths(plan)),
            kept,
        )
        log.info('the head continues with the one in "%s"', self._path)

    def _is_kept(self, party: str) -> bool:
        """Return whether a client's model is kept, as far as this process can know.

        A client's model folder is on the client's machine. The head then keeps the columns of every party
        that it knows, because a client that starts anew soon learns to use them.
        """
        if not (model_folder(self._path, party) / MANIFEST).is_file():
            return True
        return self._embedding(party) is not None

    def _tell(self, party: str, why: str) -> None:
        if party not in self._told:
            self._told.add(party)
            log.info("%s starts with a new model: %s", party, why)


def copy_head(
    earlier: nn.Module,
    head: nn.Module,
    was: dict[str, slice],
    now: dict[str, slice],
    kept: Sequence[str],
) -> None:
    """Copy a trained head on concatenated embeddings into a new one whose parties or widths differ.

    Args:
        was, now: party -> the columns of its embedding in the input of the earlier and of the new head.
        kept: the parties whose columns are copied, if their width is the same. Those of others become 0.
    """
    state = earlier.state_dict()
    layers, old_layers = input_layers(head, now), input_layers(earlier, was)
    in_layers = {id(layer.weight) for _, layer in layers} | {id(layer.bias) for _, layer in layers}
    with torch.no_grad():
        for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
            if id(tensor) not in in_layers:
                tensor.copy_(state[name])
        for place, (party, layer) in enumerate(layers):
            if party:  # a layer of one party, in a gated head
                same = dict(old_layers).get(party) if party in kept else None
                fits = same is not None and same.weight.shape == layer.weight.shape
                layer.weight.copy_(same.weight) if same is not None and fits else layer.weight.zero_()
                layer.bias.copy_(same.bias) if same is not None and fits else layer.bias.zero_()
                continue
            old = old_layers[place][1]
            layer.bias.copy_(old.bias)
            layer.weight.zero_()
            for name in kept:
                here, there = now[name], was[name]
                if here.stop - here.start == there.stop - there.start:
                    layer.weight[:, here] = old.weight[:, there]


def _columns(names: Sequence[str], sizes: Sequence[int]) -> dict[str, slice]:
    """Return party -> the columns of its embedding in the concatenation of all."""
    columns, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        columns[name] = slice(start, start + size)
        start += size
    return columns


def _settings_of(stored: StoredModel) -> ModelSettings:
    return ModelSettings(**{key: value for key, value in asdict(stored.settings).items() if key != "width"})


def keep_encoder(folder: Path, encoder: RecordEncoder | None) -> None:
    """Write the encoder of an earlier run into a party's state folder, so that a resumed run uses it too."""
    if encoder is not None:
        make_private_folder(folder)
        write_atomically(folder / _ENCODER, json.dumps(encoder.to_dict()).encode(), private=True)


def beginning_of(
    config: Config, path: Path, earlier: Path | None, *, resume: bool
) -> "EarlierRun | ResumedRun | None":
    """Return what a party's run starts with.

    Args:
        path: the run folder.
        earlier: the folder of an earlier run; None starts with new models.

    Raises:
        ConfigError: a run cannot both resume and start from another one.
    """
    if earlier is not None and resume:
        raise ConfigError(
            "VFL-7223",
            f"--from starts a new run, and --resume continues one. Found both. To continue the run in "
            f'"{path}", leave --from out: the run remembers how it started.',
        )
    if resume:
        return ResumedRun(path / STATE)
    return None if earlier is None else EarlierRun(earlier, config)


class ResumedRun:
    """The encoders that parties took from an earlier run, for a run that resumes.

    Their models are in the checkpoints.

    Args:
        folder: the folder with the parties' state folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def encoder(self, party: str) -> RecordEncoder | None:
        """Return the encoder that the run started with, if it came from an earlier run."""
        path = self._folder / party / _ENCODER
        if not path.is_file():
            return None
        try:
            return encoder_from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, DataError) as error:
            raise RunFolderError(
                "VFL-7222",
                f'"{path}" must be the encoder that the run started with. Found: {error} Restore it from a '
                "copy, or start a new run.",
            ) from error

    def carry_over(self, plan: Plan, party: str | None) -> None:
        """Do nothing: checkpoints have the models."""
