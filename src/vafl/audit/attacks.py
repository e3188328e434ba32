"""What a curious party learns in a run: labels from gradients, features from embeddings.

These attacks prove nothing when they fail. They show what is lost when they succeed, beside what
guessing without them would give.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vafl.errors import ConfigError
from vafl.protocol.messages import ClientMessage, Gradient, Join, MaskedUpload, ServerMessage, Upload
from vafl.protocol.rows import Rows
from vafl.protocol.server import Server
from vafl.run.assembly import Run
from vafl.simulation.simulator import Simulator

_KNOWN = 0.1  # share of the rows an attacker has the truth for
_REPLAYED = 1024  # rows of one replayed upload
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Attack:
    """What an attack got.

    Attributes:
        value: of what `measure` names.
        by_guessing: the same without the attack.
    """

    name: str
    measure: str
    value: float
    by_guessing: float


class Eavesdropper:
    """Client `index` as an attacker: remembers the last gradient of every row it was sent."""

    def __init__(self, run: Run, index: int = 0) -> None:
        if not isinstance(run.runtime, Simulator):
            raise ConfigError("VFL-8801", "an audit attacks a federation. Found rule.name = centralised.")
        self.server: Server = run.runtime.server
        self._receive, self._index = self.server.receive, index
        self._sent: dict[int, Rows] = {}
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


def infer_labels(heard: Eavesdropper, truth: Labels) -> list[Attack]:
    """A client guesses labels from the gradients it was sent: by sign, by cosine, by norm."""
    gradients, labels = heard.gradients[heard.seen], truth[heard.seen.numpy()]
    if not len(labels):  # it was gone all the time
        return []
    guessed = _most_common(labels)
    by_sign = _accuracy(_by_sign(gradients), labels)
    found = [
        Attack("labels from the gradient's sign", "accuracy", by_sign, guessed),
        Attack("labels by cosine to a few known ones", "accuracy", _by_cosine(gradients, labels), guessed),
    ]
    if labels.max() == 1:
        area = float(roc_auc_score(labels, gradients.norm(dim=1).numpy()))
        found.append(Attack("labels from the gradient's norm", "AUC", max(area, 1 - area), 0.5))
    return found


def replay(heard: Eavesdropper, truth: Labels) -> Attack:
    """A client uploads one record's embedding under every id, and reads the labels off the answers; what
    is not answered, since other clients would be needed for it, it guesses."""
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
    """The server decodes a client's embeddings, having learnt how from a few pairs.

    Of a secure sum it has no column but the sum.
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
        warnings.simplefilter("ignore", ConvergenceWarning)  # a decoder that could be better still decodes
        guesses = [
            make_pipeline(StandardScaler(), decoder)
            .fit(embeddings[known], features[known])
            .predict(embeddings[hidden])
            for decoder in decoders
        ]
    scores = [r2_score(features[hidden], guess, multioutput="variance_weighted") for guess in guesses]
    best = max(0.0, *map(float, scores))
    return Attack("features from embeddings, by a decoder", "R2", best, 0.0)


def _most_common(labels: Labels) -> float:
    return float(np.bincount(labels).max() / len(labels))


def _accuracy(guesses: Labels, truth: Labels) -> float:
    """Of two classes, whichever way round is better: who knows one label knows which."""
    right = float((guesses == truth).mean())
    return max(right, 1 - right) if truth.max() == 1 else right


def _by_sign(gradients: Tensor) -> Labels:
    """The gradient of a softmax, or of one output, is negative where the label is."""
    guess = gradients[:, 0] < 0 if gradients.shape[1] == 1 else gradients.argmin(dim=1)
    found: Labels = guess.numpy().astype(np.int64)
    return found


def _by_cosine(gradients: Tensor, labels: Labels) -> float:
    """Each row takes the label of the known row whose gradient points most its way."""
    known = max(len(np.unique(labels)), int(_KNOWN * len(labels)))
    directions = gradients / gradients.norm(dim=1, keepdim=True).clamp_min(1e-30)
    nearest = (directions[known:] @ directions[:known].t()).argmax(dim=1).numpy()
    return float((labels[:known][nearest] == labels[known:]).mean())
