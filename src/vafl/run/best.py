"""The models of the best evaluation: what a run with stop.patience ends with.

A simulation keeps them in memory (`BestModels`). In a federation, each party saves its own: `BestHead`
at the server, `BestEmbedding` at a client, both on disk.

When the server learns that an evaluation was the best, its clients have already trained on. So each client
saves its model at the last evaluation and at the best one. The next `Evaluate` message tells it whether the
last one was the best. The server saves its own best head before it counts that evaluation as the best.
"""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from vafl.observe.evaluation import Evaluation
from vafl.protocol.client import Client
from vafl.run.checkpoint import has_checkpoint, load_checkpoint, move_checkpoint, save_checkpoint

log = logging.getLogger("vafl.client")

_OUTPUTS = "outputs of "  # before the part: no parameter's name has a space


class Best(Protocol):
    """Keeps the models of the best evaluation so far.

    Attributes:
        evaluation: that evaluation; None before the first.
        count: how many evaluations were the best so far.
    """

    evaluation: Evaluation | None
    count: int

    def keep(self, evaluation: Evaluation) -> None:
        """Keep the models as they are now. This evaluation of them is the best so far."""

    def restore(self) -> None:
        """Return to the models that were kept last, if any, and to what their evaluation measured."""


class BestModels:
    """Keeps one copy of all modules in memory.

    Args:
        measured: the outputs of the last evaluation by part, which `restore` brings back too.
    """

    def __init__(self, modules: Sequence[nn.Module], measured: dict[str, Tensor]) -> None:
        self._modules, self._measured = modules, measured
        self._states: list[dict[str, Tensor]] = []
        self._outputs: dict[str, Tensor] = {}
        self.evaluation: Evaluation | None = None
        self.count = 0

    def keep(self, evaluation: Evaluation) -> None:
        self.evaluation, self.count = evaluation, self.count + 1
        self._outputs = dict(self._measured)
        self._states = [
            {name: tensor.clone() for name, tensor in module.state_dict().items()} for module in self._modules
        ]

    def restore(self) -> None:
        for module, state in zip(self._modules, self._states, strict=False):
            module.load_state_dict(state)
        self._measured.update(self._outputs)


class BestHead:
    """The head as it was at the best evaluation, and what it gave on the validation rows.

    Args:
        measured: the outputs of the last evaluation by part, which `restore` brings back too.

    Attributes:
        evaluation: that evaluation; None before the first.
        count: how many evaluations were the best so far.
    """

    def __init__(self, head: nn.Module, folder: Path, measured: dict[str, Tensor], *, resume: bool) -> None:
        self._head, self._folder, self._measured = head, folder, measured
        self.evaluation: Evaluation | None = None
        self.count = 0
        if resume and has_checkpoint(folder):
            _, facts = load_checkpoint(folder)
            self.evaluation, self.count = Evaluation(**facts["point"]), facts["count"]

    def keep(self, evaluation: Evaluation) -> None:
        """Keep the head as it is now: it was measured, and is the best so far."""
        self.evaluation, self.count = evaluation, self.count + 1
        facts = {"point": asdict(evaluation), "count": self.count}
        outputs = {_OUTPUTS + part: outputs for part, outputs in self._measured.items()}
        # Buffers are saved as they are. So are the outputs: a metric that is not finite is no damage.
        exempt = {*dict(self._head.named_buffers()), *outputs}
        save_checkpoint(self._folder, self._head.state_dict() | outputs, facts, exempt)

    def restore(self) -> None:
        """Return to the head that was kept last, if any, and to what its evaluation measured."""
        if self.evaluation is None:
            return
        tensors, _ = load_checkpoint(self._folder)
        for name in [name for name in tensors if name.startswith(_OUTPUTS)]:
            self._measured[name.removeprefix(_OUTPUTS)] = tensors.pop(name)
        self._head.load_state_dict(tensors)


class BestEmbedding:
    """A client's model at its last evaluation and at its best evaluation, in files.

    The client calls it before it answers an evaluation: see `AtEvaluation`.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._last, self._best = folder / "evaluated", folder / "best"
        for stored in () if resume else (self._last, self._best):
            shutil.rmtree(stored, ignore_errors=True)

    def __call__(self, client: Client, best: int, *, restore: bool) -> None:
        """Save the model, or restore the best one; `best` and `restore` are as in `Evaluate`."""
        if has_checkpoint(self._last):
            _, facts = load_checkpoint(self._last)
            # The server has counted one more best evaluation, so the model of the last one was the best. Move
            # it before the line below replaces it. After a crash in between, the server asks again with the
            # same count, and there is no last model left to move.
            if facts["best"] != best:
                move_checkpoint(self._last, self._best)
        if restore:
            self.restore(client)
        else:
            model = client.model
            save_checkpoint(self._last, model.state_dict(), {"best": best}, dict(model.named_buffers()))

    def restore(self, client: Client) -> None:
        """Restore the model of the best evaluation."""
        if has_checkpoint(self._best):
            client.load(load_checkpoint(self._best)[0])
        else:
            log.warning("no model of a best evaluation is stored here: the model stays as it is")
