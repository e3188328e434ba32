"""The [model] and [embedding] sections of a configuration; embeddings.py and heads.py make modules from them.

[model] is what all parties agree on: the width of each embedding, the head and the loss. [embedding] is what
each party chooses alone: the network that makes its embeddings. The server never learns it.
"""

import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError
from vafl.models.metrics import MetricName
from vafl.models.probabilities import Method
from vafl.models.weights import ClassWeight
from vafl.names import table_owner
from vafl.scope import Scope, setting

_BUILT_IN = ("auto", "tabular", "linear", "mlp", "cnn", "lstm", "transformer")
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")
_LARGEST_WIDTH = 2**20  # of any layer
_MOST_LAYERS = 100


@dataclass(frozen=True)
class EmbeddingSettings:
    """The network that turns a party's features into embeddings.

    Attributes:
        model: `tabular` (the default for tables), `linear`, `mlp`, `cnn` for images, `lstm` or `transformer`
            for series, or the user's own `package.module:Factory`, called as Factory(feature_shape, width).
            `auto` chooses by the features: tabular for tables, cnn for images, lstm for series, otherwise
            mlp.
        hidden: the hidden units of a tabular embedding or an mlp, the channels of a cnn, the BiLSTM units of
            an lstm, or the width of a transformer. The defaults are [128, 128], [64], [16, 16, 32, 32, 64,
            64], [16] and [64].
        weights: a safetensors file with pretrained parameters, by their names in the model. Parameters that
            the file lacks keep their initial values, for example a last layer.
        train: `all` trains every parameter. `last` freezes everything but the last layer with parameters.
            `none` freezes the whole model.
        device: the device that computes the embeddings: `cpu`, `cuda`, `cuda:N` or `mps`. `auto` uses an
            accelerator for a cnn, an lstm, a transformer or the user's own model if there is one. Other
            models are too small to gain from it. A privacy.mode that adds noise needs the CPU.
    """

    model: str = "linear"
    hidden: tuple[int, ...] = ()
    weights: str = setting("", is_path=True)
    train: Literal["all", "last", "none"] = "all"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.model not in _BUILT_IN and not _names_factory(self.model):
            raise ConfigError(
                "VFL-3031",
                f"embedding.model must be one of {', '.join(_BUILT_IN)} or package.module:Factory. "
                f'Found "{self.model}".',
            )
        _check_sizes("embedding.hidden", self.hidden)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                "VFL-3017",
                f'embedding.device must be auto, cpu, cuda, cuda:N or mps. Found "{self.device}".',
            )

    @property
    def has_factory(self) -> bool:
        """Return whether `model` names the user's code instead of a built-in model."""
        return self.model not in _BUILT_IN

    @property
    def is_heavy(self) -> bool:
        """Return whether the model may gain from an accelerator."""
        return self.model not in ("linear", "mlp", "tabular")


@dataclass(frozen=True)
class ModelSettings:
    """What all parties agree on: the width of the embeddings, the server's head, the loss and the metric.

    Attributes:
        width: the embeddings' width, for all parties or by party, such as `{ bank = 8, clinic = 32 }`. The
            sum of embeddings needs one width. 0, or a party that is not named, means the number of outputs
            for a `bias` head, 32 for a `tabular` or `gated` head and 16 for others.
        head: `bias` (the sum of the embeddings plus a bias: logistic regression), `linear`, `mlp`, `tabular`
            (a small network with a parallel linear path), or `gated` (the same on a sum in which a gate
            scales each party's embedding, so that it can ignore an absent or noisy party; it needs combine =
            "concat").
        head_hidden: the hidden units of an mlp, tabular or gated head.
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

    width: int | dict[str, int] = 0
    head: Literal["bias", "linear", "mlp", "tabular", "gated"] = "bias"
    head_hidden: tuple[int, ...] = (64,)
    combine: Literal["sum", "concat"] = "sum"
    loss: Literal["auto", "softmax", "binary", "squared"] = "auto"
    metric: Literal["auto"] | MetricName = setting("auto", scope=Scope.SERVER)
    class_weight: ClassWeight = setting("none", scope=Scope.SERVER)
    calibration: Literal["auto", "none", "platt", "isotonic"] = setting("auto", scope=Scope.SERVER)

    def __post_init__(self) -> None:
        if self.head == "bias" and self.combine == "concat":
            raise ConfigError(
                "VFL-3032",
                'model.head = "bias" adds a bias to the sum of the embeddings, so it cannot take '
                'combine = "concat". Use combine = "sum", or head = "linear".',
            )
        if self.head == "gated" and self.combine == "sum":
            raise ConfigError(
                "VFL-3030",
                'model.head = "gated" weighs the parties\' embeddings, so it cannot take their sum. Found '
                'combine = "sum". Use combine = "concat", or head = "tabular".',
            )
        for name, weight in self.class_weight.items() if isinstance(self.class_weight, dict) else ():
            if not 0 < weight < math.inf:
                raise ConfigError(
                    "VFL-3033",
                    f"model.class_weight must be above 0 and finite for every class. Found {weight} for "
                    f'"{name}". To leave a class out, drop its rows.',
                )
        widths = self.width.values() if isinstance(self.width, dict) else [self.width]
        _check_sizes("model.width", [width or 1 for width in widths])
        _check_sizes("model.head_hidden", self.head_hidden)

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

    def widths(self, parties: Sequence[str], outputs: int) -> list[int]:
        """Return the width of each party's embedding.

        Raises:
            ConfigError: a width is set for an unknown party, or a width does not fit the head.
        """
        owners = [table_owner(name) for name in parties]
        named = self.width if isinstance(self.width, dict) else {}
        if unknown := [name for name in named if name not in owners]:
            raise ConfigError(
                "VFL-3018",
                f"model.width must name parties with features: {', '.join(owners)}. Found "
                f"{', '.join(unknown)}.",
            )
        widths = [self.width_of(name, outputs) for name in owners]
        if self.head == "bias" and set(widths) != {outputs}:
            raise ConfigError(
                "VFL-3039",
                f'model.head = "bias" needs embeddings as wide as the outputs, {outputs}. Found '
                f'model.width = {self.width}. Leave width out, or use head = "linear".',
            )
        if self.combine == "sum" and len(set(widths)) > 1:
            raise ConfigError(
                "VFL-3019",
                f'model.combine = "sum" needs embeddings of one width. Found {widths}. Set one model.width, '
                'or use combine = "concat".',
            )
        return widths

    def width_of(self, party: str, outputs: int) -> int:
        """Return the width of one party's embedding, without checking that it fits the head."""
        width = self.width.get(table_owner(party), 0) if isinstance(self.width, dict) else self.width
        default = outputs if self.head == "bias" else 32 if self.head in ("tabular", "gated") else 16
        return width or default

    def head_inputs(self, widths: Sequence[int]) -> int:
        """Return the width of the head's input: of one embedding if they are summed, otherwise of all."""
        return widths[0] if self.combine == "sum" else sum(widths)


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless the sizes of layers are positive and bounded."""
    if min(sizes, default=1) < 1:
        raise ConfigError(
            "VFL-3034",
            f"{name} must be positive. Found {list(sizes)}. Correct the value, or leave it out for the "
            "default.",
        )
    if max(sizes, default=1) > _LARGEST_WIDTH or len(sizes) >= _MOST_LAYERS:
        raise ConfigError(
            "VFL-3035",
            f"{name} must be at most {_LARGEST_WIDTH:,}, with fewer than {_MOST_LAYERS} layers. Found "
            f"{max(sizes):,} and {len(sizes):,} layers. Choose a smaller model.",
        )


def _names_factory(name: str) -> bool:
    """Return whether `name` is package.module:Factory, made of Python identifiers."""
    module, _, factory = name.partition(":")
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), factory))
