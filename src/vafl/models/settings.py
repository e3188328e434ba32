"""The [model] section of a configuration; embeddings.py and heads.py make modules from it."""

import keyword
import math
from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError
from vafl.models.metrics import MetricName
from vafl.models.probabilities import Method
from vafl.models.weights import ClassWeight
from vafl.scope import Scope, setting

_BUILT_IN = ("tabular", "linear", "mlp", "cnn", "lstm")
_LARGEST_WIDTH = 2**20  # of any layer
_MOST_LAYERS = 100


@dataclass(frozen=True)
class ModelSettings:
    """The clients' embedding, the server's head, the loss and the calibration.

    Attributes:
        embedding: `tabular` (the default for tables), `linear`, `mlp`, `cnn`, `lstm`, or the user's own
            `package.module:Factory`, called as Factory(feature_shape, width).
        width: the embedding's width. 0 means the number of outputs for a `bias` head. For other heads it
            means 32 with a tabular embedding and 16 otherwise.
        hidden: the hidden units of a tabular embedding or an mlp, the channels of a cnn, or the BiLSTM units
            of an lstm. The defaults are [128, 128], [64], [16, 16, 32, 32, 64, 64] and [16].
        head: `bias` (the sum of the embeddings plus a bias: logistic regression), `linear`, `mlp`, or
            `tabular` (a small network with a parallel linear path).
        head_hidden: the hidden units of an mlp or tabular head.
        combine: the input of the head: the `sum` or the `concat`enation of the embeddings.
        loss: `softmax`, `binary` or `squared`; `auto` chooses by the labels.
        metric: the headline metric. Two classes: `auc`, `log_loss`, `accuracy`, `average_precision`, `brier`,
            `f1`. Several classes: `accuracy`, `log_loss`, `macro_f1`. Regression: `r2`, `rmse`, `mae`. `auto`
            is the first of these, `loss` the second. Every evaluation measures all of them.
        class_weight: the weight of each class in the training loss. `none`: all rows have the same weight.
            `balanced`: every class has the same total weight, so that a rare class is not ignored. Or a
            weight by class name, such as `{ yes = 5.0 }`; other classes have weight 1. Only the server needs
            it. Metrics and baselines are not weighted.
        calibration: how the probabilities of the kept model are corrected on the validation rows. `platt`:
            scale and shift of the log-odds of two classes; one scale (a temperature) for several classes.
            `isotonic`: any ascending curve, for two classes and 1,000 validation rows or more. `none`: no
            correction. `auto` is `platt` with a class_weight, which distorts probabilities, and `none`
            otherwise. Without validation rows of two classes, `auto` undoes the weights analytically.
    """

    embedding: str = "linear"
    width: int = 0
    hidden: tuple[int, ...] = ()
    head: Literal["bias", "linear", "mlp", "tabular"] = "bias"
    head_hidden: tuple[int, ...] = (64,)
    combine: Literal["sum", "concat"] = "sum"
    loss: Literal["auto", "softmax", "binary", "squared"] = "auto"
    metric: Literal["auto"] | MetricName = setting("auto", scope=Scope.PARTY)
    class_weight: ClassWeight = setting("none", scope=Scope.SERVER)
    calibration: Literal["auto", "none", "platt", "isotonic"] = setting("auto", scope=Scope.SERVER)

    def __post_init__(self) -> None:
        if self.embedding not in _BUILT_IN and not _names_factory(self.embedding):
            raise ConfigError(
                "VFL-3031",
                f"model.embedding must be one of {', '.join(_BUILT_IN)} or package.module:Factory. "
                f'Found "{self.embedding}".',
            )
        if self.head == "bias" and self.combine == "concat":
            raise ConfigError(
                "VFL-3032",
                'model.head = "bias" adds a bias to the sum of the embeddings, so it cannot take '
                'combine = "concat". Use combine = "sum", or head = "linear".',
            )
        for name, weight in self.class_weight.items() if isinstance(self.class_weight, dict) else ():
            if not 0 < weight < math.inf:
                raise ConfigError(
                    "VFL-3033",
                    f"model.class_weight must be above 0 and finite for every class. Found {weight} for "
                    f'"{name}". To leave a class out, drop its rows.',
                )
        hidden = (*self.hidden, *self.head_hidden, 1)
        if self.width < 0 or min(hidden) < 1:
            raise ConfigError(
                "VFL-3034",
                f"model.width, hidden and head_hidden must be positive. Found width = {self.width}, "
                f"hidden = {list(self.hidden)}, head_hidden = {list(self.head_hidden)}. Correct the value, "
                "or leave it out for the default.",
            )
        if max(self.width, *hidden) > _LARGEST_WIDTH or len(hidden) > _MOST_LAYERS:
            raise ConfigError(
                "VFL-3035",
                f"model.width, hidden and head_hidden must be at most {_LARGEST_WIDTH:,}, with fewer than "
                f"{_MOST_LAYERS} hidden layers. Found a width of {max(self.width, *hidden):,} and "
                f"{len(hidden) - 1:,} hidden layers. Choose a smaller model.",
            )

    @property
    def calibration_method(self) -> Method:
        """The calibration, with `auto` resolved."""
        if self.calibration != "auto":
            return self.calibration
        return "none" if self.class_weight == "none" else "platt"

    def check_calibration(self, classes: int, *, several: bool) -> None:
        """Check that the calibration fits the labels; `auto` always does.

        Args:
            classes: the number of classes; 0 for a regression.
            several: whether there are validation rows of more than one class.

        Raises:
            ConfigError: the calibration does not fit.
        """
        if self.calibration in ("auto", "none"):
            return
        if not classes or (self.calibration == "isotonic" and classes != 2):
            found, instead = (f"{classes} classes", '"platt"') if classes else ("numbers", '"none"')
            raise ConfigError(
                "VFL-3036",
                f'model.calibration = "{self.calibration}" does not fit labels with {found}. Use {instead}.',
            )
        if not several:
            raise ConfigError(
                "VFL-3037",
                f'model.calibration = "{self.calibration}" needs validation rows of at least two classes. '
                "Found none, or rows of one class. Hold out more rows (data.validation_fraction), or set "
                'model.calibration = "none".',
            )

    @property
    def has_factory(self) -> bool:
        """Return whether `embedding` names the user's code instead of a built-in model."""
        return self.embedding not in _BUILT_IN

    def loss_for(self, classes: int) -> str:
        """Return the loss for labels of `classes` classes; 0 means a regression.

        Raises:
            ConfigError: the configured loss does not fit such labels.
        """
        if self.loss == "auto":
            return "squared" if not classes else "binary" if classes == 2 else "softmax"
        fits = {"softmax": classes >= 2, "binary": classes == 2, "squared": True}[self.loss]
        if not fits:
            found = f"{classes} classes" if classes else "numbers"
            raise ConfigError(
                "VFL-3038",
                f'model.loss = "{self.loss}" does not fit labels with {found}. Use loss = "auto", or set '
                "data.task.",
            )
        return self.loss

    def outputs_for(self, classes: int) -> int:
        """Return the number of outputs of the head for labels of `classes` classes."""
        return classes if self.loss_for(classes) == "softmax" else 1

    def embedding_width(self, outputs: int) -> int:
        """Return the width of an embedding.

        Raises:
            ConfigError: the head is `bias`, and the configured width is not the number of outputs.
        """
        if self.head != "bias":
            return self.width or (32 if self.embedding == "tabular" else 16)
        if self.width not in (0, outputs):
            raise ConfigError(
                "VFL-3039",
                f'model.head = "bias" needs embeddings as wide as the outputs, {outputs}. Found '
                f'model.width = {self.width}. Leave width out, or use head = "linear".',
            )
        return outputs

    def head_inputs(self, clients: int, outputs: int) -> int:
        """Return the width of the head's input: of one embedding if they are summed, otherwise of all."""
        width = self.embedding_width(outputs)
        return width if self.combine == "sum" else width * clients


def _names_factory(name: str) -> bool:
    """Return whether `name` is package.module:Factory, made of Python identifiers."""
    module, _, factory = name.partition(":")
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), factory))
