"""Start a run from the models of an earlier one (`--from RUN`, and `--join` at a new party).

The records may be new, a party's network may have changed, and a party may have joined. What fits is kept:

    a client's model and encoder    if its network, its width and the form of its features are as before
    the head                        if its kind and the classes are as before

A new model must not disturb the others before it has learnt anything:

    concatenated embeddings    a new party, or one with another width, gets new columns in the input layers of
                               the head. They start at 0.
    other new models           the head uses their embeddings at once: it takes a sum, or it keeps the party's
                               columns. So the embeddings start near 0.

Everything else starts as in any run: optimisers, schedules, the embedding table and the split of the records.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from vafl.config import Config, read_config
from vafl.data.encoding import Encoder
from vafl.data.sources.base import RecordEncoder, encoder_from_dict
from vafl.data.sources.common import reshaped
from vafl.data.sources.opening import open_source
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.files import make_private_folder, write_atomically
from vafl.models.heads import input_layers
from vafl.models.pretrained import start_near_zero
from vafl.models.settings import ModelSettings
from vafl.models.store import MANIFEST, StoredModel
from vafl.names import SERVER, table_owner
from vafl.privacy.modes import MODES
from vafl.run.agreement import STATE
from vafl.run.assembly import widths
from vafl.run.checkpoint import load_facts
from vafl.run.model_store import model_folder, open_model, rebuild
from vafl.run.plan import Beginning, Plan, encoder_of, form_for, tables_of
from vafl.transport.grpc.terms import JOINS

log = logging.getLogger("vafl.model")

_ENCODER = "encoder.json"  # in a party's state folder: its encoder, if it is that of an earlier run


class EarlierRun:
    """The trained models of an earlier run, for the parties whose models are in the folder.

    Args:
        path: the run folder of the earlier run; None for a client that was not in it.
        config: the configuration of the new run.
        party: the party of this process; empty in a simulation.

    Attributes:
        from_earlier_run: the name of the earlier run; JOINS if the party was not in it.

    Raises:
        RunFolderError: the folder has no models.
    """

    def __init__(self, path: Path | None, config: Config, party: str = "") -> None:
        self._path, self._config = path, config
        self._examined: dict[str, StoredModel | None] = {}  # clients in this process; None starts anew
        if path is not None and not any((path / "models").glob(f"*/{MANIFEST}")):
            raise RunFolderError(
                "VFL-7221",
                f'--from needs the folder of a finished run with trained models. Found none in "{path}". '
                "Name another folder, or start without --from.",
            )
        stored = self._stored(party) if party else None
        self.from_earlier_run = JOINS if stored is None else stored.manifest.run

    def encoder(self, party: str) -> RecordEncoder | None:
        """Return the encoder of a party whose model is kept; None if the party needs a new one."""
        stored = self._kept(party)
        return None if stored is None else encoder_of(stored)

    def carry_over(self, plan: Plan, party: str | None) -> None:
        """Copy the earlier models into those of the plan.

        Args:
            party: the party of this process; None in a simulation, which has all models.

        Raises:
            RunFolderError: there is no head, or the earlier run had other classes or less protection.
        """
        for index, each in enumerate(plan.data.parties):
            if not each.features.numel():
                continue
            stored, features = self._kept(each.name), list(each.features.shape[1:])
            if stored is not None and stored.manifest.features != features:  # of a public data set
                self._start_anew(each.name, reshaped(stored.manifest.features, features))
                stored = None
            if stored is not None:
                stored.load_into(plan.models[index])
            elif self._is_used_at_once(each.name, plan):
                start_near_zero(plan.models[index])
        if party in (None, SERVER):
            self._carry_head(plan)

    def _kept(self, party: str) -> StoredModel | None:
        """Return the earlier model of a client in this process if the new run can keep it."""
        if party not in self._examined:
            self._examined[party] = stored = self._stored(party)
            if stored is None:
                log.info("%s starts with a new model: it was not in the earlier run", party)
            elif why := self._changed(stored) or self._changed_source(stored):
                self._start_anew(party, why)
            else:
                self._require_protection(stored)
                log.info('%s continues with its model in "%s"', party, self._path)
        return self._examined[party]

    def _start_anew(self, party: str, why: str) -> None:
        self._examined[party] = None
        log.warning("%s starts with a new model: %s", party, why)

    def _stored(self, party: str) -> StoredModel | None:
        if self._path is None or not (model_folder(self._path, party) / MANIFEST).is_file():
            return None
        return open_model(self._path, party)

    def _is_used_at_once(self, party: str, plan: Plan) -> bool:
        """Return whether the trained head uses the embeddings of a client's new model from the start."""
        model, stored = plan.config.model, self._stored(party)
        if stored is None:
            return model.combine == "sum"
        sizes = widths(plan)
        place = [each.name for each in plan.data.parties].index(party)
        before = stored.manifest.widths[stored.manifest.parties.index(party)]
        return sizes[place] == before and not _other_head(stored, model, sizes)

    def _changed(self, stored: StoredModel) -> str:
        """Return why the new run's settings need another model of a client; empty if they do not."""
        manifest, config = stored.manifest, self._config.of(stored.manifest.party)
        own = {"model": config.embedding.model, "hidden": list(config.embedding.hidden)}
        if own != manifest.embedding:
            return f"its network was {manifest.embedding} and is {own}"
        before = manifest.widths[manifest.parties.index(manifest.party)]
        now = config.model.width_of(manifest.party, manifest.outputs)
        return "" if now == before else f"its embeddings were {before} wide and are {now}"

    def _changed_source(self, stored: StoredModel) -> str:
        """Return why a client's records need another encoder; empty if they do not."""
        encoder, party = encoder_of(stored), stored.manifest.party
        if encoder is None or not self._config.data.is_tabular:
            same = (encoder is None) == (not self._config.data.is_tabular)
            return "" if same else "data.name has changed"
        sources, owner = tables_of(self._config)[1], table_owner(party)
        if sources[owner].kind != encoder.kind:
            return f"its source was of the kind {encoder.kind} and is {sources[owner].kind}"
        if encoder.flags_absent != (self._config.data.records == "labelled"):
            return "data.records has changed"
        if isinstance(encoder, Encoder) and encoder.form != form_for(self._config, party):
            return "the form of its features has changed"
        return encoder.misfit(open_source(sources, party))

    def _require_protection(self, stored: StoredModel) -> None:
        """Refuse a model that may carry records past the noise of the new run.

        Raises:
            RunFolderError: the model was trained with less protection.
        """
        manifest, protection = stored.manifest, self._config.of(stored.manifest.party).privacy.protection
        mode = manifest.settings.get("privacy", {}).get("mode", "none")
        before = MODES.get(mode, MODES["none"])
        less = protection.guaranteed and not before.guaranteed
        if less or (protection.noises_anything and not before.noises_anything):
            raise RunFolderError(
                "VFL-7224",
                f'privacy.mode = "{protection.name}" needs a model that was trained with as much protection, '
                "because the parameters may reveal the records that they were trained on. Found a model of "
                f'{manifest.party} that was trained with "{before.name}". Start without --from. If it '
                "has seen no private records, use it as embedding.weights.",
            )

    def _carry_head(self, plan: Plan) -> None:
        stored = self._stored(SERVER)
        if stored is None:
            raise RunFolderError(
                "VFL-7228",
                f'--from needs the head of the earlier run at the server. Found none in "{self._path}". Name '
                "the server's own run folder.",
            )
        stored.require({"classes": list(plan.data.classes or ()), "outputs": plan.task.outputs})
        self._require_label_protection()
        names, sizes = [each.name for each in plan.data.parties], widths(plan)
        if why := _other_head(stored, plan.config.model, sizes):
            log.warning("the server starts with a new head: %s", why)
            return
        earlier = rebuild(stored)
        if plan.config.model.combine == "sum":
            plan.head.load_state_dict(earlier.state_dict())
        else:
            was = _columns(stored.manifest.parties, stored.manifest.widths)
            copy_head(earlier, plan.head, was, _columns(names, sizes))
        log.info('the head continues with the one in "%s"', self._path)

    def _require_label_protection(self) -> None:
        """Refuse a head that has learnt true labels, for a run that protects labels.

        Raises:
            RunFolderError: labels.epsilon was 0 in the earlier run.
        """
        path = None if self._path is None else self._path / "config.toml"
        before = read_config(path).labels.epsilon if path is not None and path.is_file() else 0.0
        if self._config.labels.epsilon and not before:
            raise RunFolderError(
                "VFL-7225",
                "labels.epsilon needs a head that was trained with it, because a head that has learnt true "
                f'labels reveals them in its gradients. Found the head in "{self._path}", trained without '
                "labels.epsilon. Start without --from.",
            )


def _other_head(stored: StoredModel, now: ModelSettings, sizes: Sequence[int]) -> str:
    """Return why the new run needs another head; empty if it can keep the earlier one.

    Args:
        sizes: the widths of the embeddings in the new run.
    """
    was = stored.settings
    before, after = ((each.head, each.combine, list(each.head_hidden)) for each in (was, now))
    if before != after:
        return f"it was {before} and is {after} (head, combine, head_hidden)"
    if now.combine == "sum" and now.head_inputs(sizes) != was.head_inputs(stored.manifest.widths):
        return f"the embeddings were {was.head_inputs(stored.manifest.widths)} wide and are {sizes[0]}"
    return ""


def copy_head(
    earlier: nn.Module, head: nn.Module, was: Mapping[str, slice], now: Mapping[str, slice]
) -> None:
    """Copy a trained head on concatenated embeddings into a new one whose parties or widths differ.

    Args:
        was, now: party -> the columns of its embedding in the input of the earlier and of the new head. The
            columns of a party that has the same width in both are copied. Those of others become 0.
    """
    state = earlier.state_dict()
    kept = [name for name in now if name in was and _width(now[name]) == _width(was[name])]
    layers, old_layers = input_layers(head, now), input_layers(earlier, was)
    in_layers = {id(layer.weight) for _, layer in layers} | {id(layer.bias) for _, layer in layers}
    with torch.no_grad():
        for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
            if id(tensor) not in in_layers:
                tensor.copy_(state[name])
        for place, (party, layer) in enumerate(layers):
            layer.weight.zero_()
            layer.bias.zero_()
            if not party:
                old = old_layers[place][1]
                layer.bias.copy_(old.bias)
                for name in kept:
                    layer.weight[:, now[name]] = old.weight[:, was[name]]
            elif party in kept:  # a gated head has a layer for each party
                old = dict(old_layers)[party]
                layer.weight.copy_(old.weight)
                layer.bias.copy_(old.bias)


def _width(columns: slice) -> int:
    return int(columns.stop - columns.start)


def _columns(names: Sequence[str], sizes: Sequence[int]) -> dict[str, slice]:
    """Return party -> the columns of its embedding in the concatenation of all."""
    columns, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        columns[name] = slice(start, start + size)
        start += size
    return columns


def keep_encoder(folder: Path, encoder: RecordEncoder | None) -> None:
    """Write the encoder of an earlier run into a party's state folder, so that a resumed run uses it too.

    Call it before the first checkpoint: a run that has a checkpoint can be resumed.

    Args:
        encoder: None removes an encoder that an older run has left in the folder.
    """
    path = folder / _ENCODER
    if encoder is None:
        path.unlink(missing_ok=True)
        return
    make_private_folder(folder)
    write_atomically(path, json.dumps(encoder.to_dict()).encode(), private=True)


def require_new_models(folder: Path) -> None:
    """Check that a party without a checkpoint did not start with an earlier model, which would now be lost.

    Args:
        folder: the party's state folder.

    Raises:
        RunFolderError: the run was started with --from, and was killed before the first checkpoint.
    """
    if (folder / _ENCODER).is_file():
        raise RunFolderError(
            "VFL-7227",
            f'--resume needs a checkpoint in "{folder}". Found none, because the run was killed before it '
            "began. Start it again with --from and --overwrite.",
        )


def beginning_of(
    config: Config,
    path: Path,
    earlier: Path | None,
    *,
    party: str = "",
    joins: bool = False,
    resume: bool = False,
) -> Beginning | None:
    """Return what a party's run starts with; None starts with new models.

    Args:
        path: the run folder.
        earlier: the folder of an earlier run, or None.
        party: the party of this process.
        joins: whether the party joins parties that start from an earlier run, which it was not in.

    Raises:
        ConfigError: the options contradict each other, or the run would start from its own folder.
    """
    options = {"--from": earlier is not None, "--join": joins, "--resume": resume}
    chosen = [option for option, is_given in options.items() if is_given]
    if len(chosen) > 1:
        raise ConfigError(
            "VFL-7223",
            "--from starts with the party's earlier model, --join with a new one beside parties that use "
            f"--from, and --resume continues an interrupted run. Found {' and '.join(chosen)}. Use one of "
            "them. A resumed run remembers how it started.",
        )
    if earlier is not None and earlier.resolve() == path.resolve():
        raise ConfigError(
            "VFL-7226",
            f'--from and --out must be different folders, so that the earlier models stay. Found "{path}" '
            "for both. Choose another --out.",
        )
    if resume:
        return ResumedRun(path / STATE, party)
    return EarlierRun(earlier, config, party) if joins or earlier is not None else None


class ResumedRun:
    """The encoders that parties took from an earlier run, for a run that resumes.

    Their models are in the checkpoints.

    Args:
        folder: the folder with the parties' state folders.
        party: the party of this process.

    Attributes:
        from_earlier_run: the run whose models it started from; empty if there is none.

    Raises:
        RunFolderError: the party has no checkpoint, or it is damaged.
    """

    def __init__(self, folder: Path, party: str) -> None:
        self._folder = folder
        terms = load_facts(folder / party).get("terms", {})
        self.from_earlier_run = str(terms.get("from_earlier_run", ""))

    def encoder(self, party: str) -> RecordEncoder | None:
        """Return the encoder that the run started with, if it came from an earlier run."""
        path = self._folder / party / _ENCODER
        if not path.is_file():
            return None
        try:
            return encoder_from_dict(dict(json.loads(path.read_text(encoding="utf-8"))))
        except (TypeError, ValueError, DataError) as error:
            raise RunFolderError(
                "VFL-7222",
                f'"{path}" must be the encoder that the run started with. Found: {error} Restore it from a '
                "copy, or start a new run.",
            ) from error

    def carry_over(self, plan: Plan, party: str | None) -> None:
        """Do nothing: checkpoints have the models."""
