"""Check a server's trace: every upload used at most once, no durable upload lost, no delay bound broken.

A server that resumes goes back to a checkpoint: later steps of earlier processes are undone. The remaining
steps are the history of the final model.
"""

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class History:
    """The history that a run's trace shows.

    Attributes:
        steps: the steps of the final model: iteration, uploads, delay and time of each.
        twice: uploads that a step used although an earlier step that was not undone had used them.
        lost: uploads that were reported as durable and that no step of the history uses.
        undone: steps that the server lost in crashes.
        given_up: uploads that no step used, by agreement when a party came back.
        longest_delay: the longest delay of the cells that steps used, including undone steps.
        unknown_cells: cells that were used without an upload, or after they were lost in a crash.
    """

    steps: list[dict] = field(default_factory=list)
    twice: list[tuple[int, int]] = field(default_factory=list)
    lost: set[tuple[int, int]] = field(default_factory=set)
    undone: int = 0
    lives: int = 0
    given_up: set[tuple[int, int]] = field(default_factory=set)
    longest_delay: int = 0
    unknown_cells: int = 0
    _told: Counter = field(default_factory=Counter)
    _made: set[tuple[int, int]] = field(default_factory=set)

    def take(self, line: dict) -> None:
        getattr(self, f"_{line['what']}", lambda line: None)(line)

    def _life(self, line):
        """Add one process's part of the trace: undo later steps, and check what was reported as durable."""
        self.lives += 1
        kept = [step for step in self.steps if step["iteration"] < line["iteration"]]
        self.undone += len(self.steps) - len(kept)
        self.steps = kept
        self._made = {tuple(upload) for step in kept for upload in step["uploads"]}
        for client, count in enumerate(line["activations"]):
            self.lost |= {(client, activation) for activation in range(count, self._told[client])}
            self._tell(client, count)

    def _step(self, line):
        self.steps.append(line)
        self.longest_delay = max(self.longest_delay, line["delay"])
        self.unknown_cells += line["unknown"]
        for upload in map(tuple, line["uploads"]):
            if upload in self._made:
                self.twice.append(upload)
            self._made.add(upload)

    def _durable(self, line):
        for client, count in enumerate(line["told"]):
            self._tell(client, count)

    def _join(self, line):
        for activation in line["given_up"]:
            self._give_up(line["client"], activation)

    def _skipped(self, line):
        if (line["client"], line["activation"]) not in self._made:
            self._give_up(line["client"], line["activation"])

    def _give_up(self, client, activation):
        if activation < self._told[client]:
            self.lost.add((client, activation))
        self.given_up.add((client, activation))

    def _tell(self, client, count):
        self._told[client] = max(self._told[client], count)
        told = {(client, activation) for activation in range(self._told[client])}
        self.lost |= told - self._made - self.given_up


def read_history(path) -> History:
    history = History()
    for line in path.read_text().splitlines():
        history.take(json.loads(line))
    return history
