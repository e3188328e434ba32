"""What a configuration says of the models; embeddings.py and heads.py make them."""

from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError

_BUILT_IN = ("linear", "mlp", "cnn", "lstm")
_METRICS = {"softmax": ("accuracy", "loss"), "binary": ("accuracy", "auc", "loss"), "squared": ("r2", "loss")}


@dataclass(frozen=True)
class ModelSettings:
    """The clients' embedding, the server's head, the loss.

    Attributes:
        embedding: `linear`, `mlp`, `cnn`, `lstm`, or the user's own `package.module:Factory`,
            called as Factory(feature_shape, width).
        width: the embedding's width; 0 means the number of outputs for a `bias` head, else 16.
        hidden: hidden units of an mlp, channels of a cnn, BiLSTM units of an lstm; empty means
            the defaults [64], [16, 16, 32, 32, 64, 64] and [16].
        head: `bias` (the sum of the embeddings plus a bias: logistic regression), `linear` or `mlp`.
        head_hidden: hidden units of an mlp head.
        combine: what the head sees, the `sum` or the `concat`enation of the embeddings.
        loss: `softmax`, `binary`, `squared`; `auto` follows from the labels.
        metric: `accuracy`, `auc`, `r2`, `loss`; `auto` is accuracy, or r2 for the squared loss.
    """

    embedding: str = "linear"
    width: int = 0
    hidden: tuple[int, ...] = ()
    head: Literal["bias", "linear", "mlp"] = "bias"
    head_hidden: tuple[int, ...] = (64,)
    combine: Literal["sum", "concat"] = "sum"
    loss: Literal["auto", "softmax", "binary", "squared"] = "auto"
    metric: Literal["auto", "accuracy", "auc", "r2", "loss"] = "auto"

    def __post_init__(self) -> None:
        if self.embedding not in _BUILT_IN and ":" not in self.embedding:
            raise ConfigError(
                f"model.embedding must be one of {', '.join(_BUILT_IN)} or package.module:Factory. "
                f'Found "{self.embedding}".'
            )
        if self.head == "bias" and self.combine == "concat":
            raise ConfigError(
                'model.head = "bias" adds a bias to the sum of the embeddings, so it cannot take '
                'combine = "concat". Use combine = "sum", or head = "linear".'
            )
        if self.width < 0 or min((*self.hidden, *self.head_hidden, 1)) < 1:
            raise ConfigError(
                f"model.width, hidden and head_hidden must be positive. Found width = {self.width}, "
                f"hidden = {list(self.hidden)}, head_hidden = {list(self.head_hidden)}. Leave out what you "
                "do not mean to set."
            )

    def metric_for(self, loss: str) -> str:
        """The metric's name once the loss is known; refuses a metric that makes no sense for it."""
        allowed = _METRICS[loss]
        name = allowed[0] if self.metric == "auto" else self.metric
        if name not in allowed:
            raise ConfigError(f'model.metric for the {loss} loss must be one of {allowed}. Found "{name}".')
        return name

    def embedding_width(self, outputs: int) -> int:
        if self.head != "bias":
            return self.width or 16
        if self.width not in (0, outputs):
            raise ConfigError(
                f'model.head = "bias" needs embeddings as wide as the outputs, {outputs}. Found '
                f'model.width = {self.width}. Leave width out, or use head = "linear".'
            )
        return outputs
