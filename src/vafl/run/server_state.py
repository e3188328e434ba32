"""The server's durable state: the embedding table, the head, the optimiser and the counters."""

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vafl.errors import RunFolderError
from vafl.files import make_private_folder, remove_drafts
from vafl.protocol.marks import MarkMemory
from vafl.protocol.server import RECALL_ROWS
from vafl.protocol.table import FOREVER, EmbeddingTable, record_type
from vafl.run.agreement import make_terms
from vafl.run.assembly import make_server, make_table, widths, with_drawn_labels
from vafl.run.best import BestHead
from vafl.run.checkpoint import (
    MappedArray,
    flatten,
    load_checkpoint,
    restoring,
    save_checkpoint,
    unflatten,
)
from vafl.run.plan import Plan

# The server may accept this many uploads of one client between the moment a checkpoint is due and the moment
# it is written: uploads that wait for a step, and uploads in the same batch of messages.
_BEFORE_A_CHECKPOINT = 1024


class ServerState:
    """The server's durable state: the embedding table in a memory-mapped file, and a checkpoint of the rest.

    Attributes:
        plan: the run's plan, with the labels that the server trains on.
        outputs: "validation" or "test" -> the head's outputs on these rows at the last evaluation.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        resume: bool,
        marks: MarkMemory | None = None,
        recall_rows: int = RECALL_ROWS,
    ) -> None:
        make_private_folder(folder)
        remove_drafts(folder)
        self._folder, self.terms, self._epsilon = folder, make_terms(plan), plan.config.labels.epsilon
        self._checkpoint_every = plan.config.network.checkpoint_every
        self._mapped: MappedArray | None = None
        rows = plan.data.parts.total
        if plan.config.privacy.secure_sum:  # every round computes new sums, so no table is kept
            table = make_table(plan, rows)
        else:
            table = self._mapped_table(plan, rows, fresh=not resume)
        tensors, self.facts = load_checkpoint(folder) if resume else ({}, {})
        if (before := self.facts.get("label_epsilon", self._epsilon)) != self._epsilon:
            raise RunFolderError(
                "VFL-7211",
                f"--resume needs the labels.epsilon that the run started with: the run in "
                f'"{folder}" has {before:g} (0 means unchanged labels). Found {self._epsilon:g}. Set it to '
                f"{before:g}, or start a new run.",
            )
        self.plan = _with_kept_labels(plan, folder, resume=resume)
        run = self.facts.get("run") or secrets.randbits(62)
        self.server = make_server(self.plan, table, marks, run=run, recall_rows=recall_rows)
        self.outputs: dict[str, torch.Tensor] = {}
        self.best = BestHead(self.server.head, folder / "best", self.outputs, resume=resume)
        if resume:
            self._restore(tensors)
        else:
            self.save({})  # a server that is killed at any time from here on can be resumed

    def _mapped_table(self, plan: Plan, rows: int, *, fresh: bool) -> EmbeddingTable:
        """Return an embedding table in a memory-mapped file, which survives this process."""
        client_widths, summed = widths(plan), plan.config.model.combine == "sum"
        kind = record_type(client_widths, summed=summed)
        self._mapped = MappedArray(self._folder / "table.records", (rows,), kind, fresh=fresh)
        if fresh:
            self._mapped.array["stored_at"] = -FOREVER
        return EmbeddingTable(rows, client_widths, summed=summed, memory=self._mapped.array)

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Return to the checkpoint.

        The table treats cells that were stored after the checkpoint as unknown until their clients send
        them again.
        """
        server, facts = self.server, self.facts
        with restoring(self._folder):
            server.head.load_state_dict({name: tensors[f"head.{name}"] for name in server.head.state_dict()})
            server.restore(
                facts["iteration"],
                facts["activations"],
                unflatten(facts["optimiser"], tensors),
                forgettable=facts["forgettable"],
            )
        server.delays.restore(unflatten(facts["delays"], tensors))

    def save(self, account: dict[str, Any]) -> list[int]:
        """Write a checkpoint and return how many uploads of each client it includes.

        Args:
            account: time and traffic of the run so far; empty before it starts.
        """
        # The table must be on disk before the checkpoint that refers to it replaces the old one.
        if self._mapped is not None:
            self._mapped.flush()
        server = self.server
        tensors, optimiser = flatten("optimiser", server.descent.state())
        counted, delays = flatten("delays", server.delays.state())
        tensors |= counted | {f"head.{name}": tensor for name, tensor in server.head.state_dict().items()}
        counts = server.uploads_done()
        facts = {
            "terms": asdict(self.terms),
            "run": server.run,
            "label_epsilon": self._epsilon,
            "iteration": server.iteration,
            "activations": counts,
            "forgettable": self._checkpoint_every + _BEFORE_A_CHECKPOINT,
            "optimiser": optimiser,
            "delays": delays,
            "account": account,
        }
        buffers = {f"head.{name}" for name, _ in server.head.named_buffers()}
        save_checkpoint(self._folder, tensors, facts, buffers)
        return counts


def _with_kept_labels(plan: Plan, folder: Path, *, resume: bool) -> Plan:
    """Return the plan with the labels to train on.

    A resumed run trains on the labels that it started with, because drawing them again would spend epsilon
    again.
    """
    path = folder / "labels.safetensors"
    settings = plan.config.labels
    if resume and settings.epsilon and not settings.file and not path.is_file():
        raise RunFolderError(
            "VFL-7212",
            f'--resume with labels.epsilon needs the labels that the run drew. "{path}" is missing. Restore '
            "it, or start without --resume, which draws new labels and spends epsilon again.",
        )
    return with_drawn_labels(plan, path)
