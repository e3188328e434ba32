"""Attacks by an honest-but-curious party: infer labels from gradients, and features from embeddings.

A successful attack shows a leak. A failed attack proves nothing. Each result is reported beside the score of
guessing without the attack.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vafl.arrays import Integers, RowIds
from vafl.errors import ConfigError
from vafl.protocol.messages import ClientMessage, Gradient, Join, MaskedUpload, ServerMessage, Upload
from vafl.protocol.server import Server
from vafl.run.assembly import Run
from vafl.simulation.simulator import Simulator

_KNOWN = 0.1  # share of rows whose labels or features the attacker knows
_REPLAYED = 1024  # rows per replayed upload


@dataclass(frozen=True)
class Attack:
    """The result of an attack.

    Attributes:
        measure: the name of the score, such as "accuracy".
        value: the attack's score.
        by_guessing: the score of guessing without the attack.
    """

    name: str
    measure: str
    value: float
    by_guessing: float


class Eavesdropper:
    """Client `index` as an attacker: it stores the last gradient that it received for every row."""

    def __init__(self, run: Run, index: int = 0) -> None:
        if not isinstance(run.runtime, Simulator):
            raise ConfigError(
                "VFL-8801",
                "an audit needs a federation to attack. Found rule.name = centralised. Choose another rule.",
            )
        self.server: Server = run.runtime.server
        self._receive, self._index = self.server.receive, index
        self._sent: dict[int, RowIds] = {}
        width = self.server.table.widths[index]
        self.gradients = torch.zeros(run.data.rows, width)
        self.seen = torch.zeros(run.data.rows, dtype=torch.bool)
        self.server.receive = self._listen  # type: ignore[method-assign]

    def _listen(self, message: ClientMessage) -> list[ServerMessage]:
        if isinstance(message, Upload | MaskedUpload) and message.client == self._index:
            self._sent[message.activation] = message.rows
        replies = self._receive(message)
        for reply in replies:
            if isinstance(reply, Gradient) and reply.client == self._index:
                rows = self._sent[reply.activation]
                self.gradients[rows] = torch.from_numpy(reply.gradients) * len(rows)
                self.seen[rows] = True
        return replies


def infer_labels(heard: Eavesdropper, truth: Integers) -> list[Attack]:
    """Guess labels as a client does, from the gradients it received: by sign, by cosine and by norm.

    Return no attacks if the client received no gradients.
    """
    gradients, labels = heard.gradients[heard.seen], truth[heard.seen.numpy()]
    if not len(labels):  # the client was absent for the whole run
        return []
    guessed = _most_common(labels)
    by_sign = _accuracy(_by_sign(gradients), labels)
    attacks = [
        Attack("labels from the gradient's sign", "accuracy", by_sign, guessed),
        Attack("labels by cosine to a few known ones", "accuracy", _by_cosine(gradients, labels), guessed),
    ]
    if labels.max() == 1:
        area = float(roc_auc_score(labels, gradients.norm(dim=1).numpy()))
        attacks.append(Attack("labels from the gradient's norm", "AUC", max(area, 1 - area), 0.5))
    return attacks


def replay(heard: Eavesdropper, truth: Integers) -> Attack:
    """Upload one record's embedding under every id, as client 0, and read the labels off the gradients.

    With identical embeddings, only the label makes the gradients differ. The server does not answer for rows
    that still lack embeddings of other clients; the attack guesses the most common label for those.
    """
    server, rows = heard.server, len(truth)
    server.last_iteration += rows
    if 0 in server.absent:
        server.receive(Join(0, server.activations[0], server.activations[0]))
    embedding = server.table.column(0)[0].copy()
    guesses = np.full(rows, np.bincount(truth).argmax())
    sequence = 1 << 40
    for start in range(0, rows, _REPLAYED):
        chosen = np.arange(start, min(start + _REPLAYED, rows))
        copies = np.tile(embedding, (len(chosen), 1))
        upload = Upload(0, sequence + start, server.activations[0], chosen, copies)
        for reply in server.receive(upload):
            if isinstance(reply, Gradient) and (reply.client, reply.activation) == (0, upload.activation):
                guesses[chosen] = _by_sign(torch.from_numpy(reply.gradients))
    value = _accuracy(guesses, truth)
    return Attack("one embedding replayed under every id", "accuracy", value, _most_common(truth))


def invert_features(run: Run, heard: Eavesdropper) -> Attack:
    """Decode client 0's embeddings as the server, with a decoder trained on a few known records.

    With a secure sum, the server has only the sum over all clients to decode.
    """
    embeddings = heard.server.table.column(0)[: run.data.rows]
    features = run.data.parties[0].features[run.data.train].flatten(1).numpy()
    order = np.random.default_rng(0).permutation(len(features))
    known, hidden = np.split(order, [max(2, int(_KNOWN * len(features)))])
    decoders = [
        RidgeCV(np.logspace(-6, 3, 10)),
        MLPRegressor(
            hidden_layer_sizes=(128,), max_iter=200, early_stopping=len(known) >= 100, random_state=0
        ),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # an imperfect decoder is good enough
        guesses = [
            make_pipeline(StandardScaler(), decoder)
            .fit(embeddings[known], features[known])
            .predict(embeddings[hidden])
            for decoder in decoders
        ]
    scores = [r2_score(features[hidden], guess, multioutput="variance_weighted") for guess in guesses]
    best = max(0.0, *map(float, scores))
    return Attack("features from embeddings, by a decoder", "R2", best, 0.0)


def _most_common(labels: Integers) -> float:
    """Return the accuracy of always guessing the most common label."""
    return float(np.bincount(labels).max() / len(labels))


def _accuracy(guesses: Integers, truth: Integers) -> float:
    """Return the share of correct guesses.

    With two classes, swap the classes if that is better: one known label tells the attacker to do so.
    """
    right = float((guesses == truth).mean())
    return max(right, 1 - right) if truth.max() == 1 else right


def _by_sign(gradients: Tensor) -> Integers:
    """Guess the output with the most negative gradient: a softmax gradient is negative only at the label."""
    guess = gradients[:, 0] < 0 if gradients.shape[1] == 1 else gradients.argmin(dim=1)
    labels: Integers = guess.numpy().astype(np.int64)
    return labels


def _by_cosine(gradients: Tensor, labels: Integers) -> float:
    """Return the accuracy of giving each row the label of the known row with the most similar gradient."""
    known = max(len(np.unique(labels)), int(_KNOWN * len(labels)))
    directions = gradients / gradients.norm(dim=1, keepdim=True).clamp_min(1e-30)
    nearest = (directions[known:] @ directions[:known].t()).argmax(dim=1).numpy()
    return float((labels[:known][nearest] == labels[known:]).mean())
