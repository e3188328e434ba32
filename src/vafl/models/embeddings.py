"""The clients' embedding models: built-in networks, or the user's own torch module."""

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vafl.errors import ConfigError
from vafl.models.settings import EmbeddingSettings
from vafl.models.tabular import Input, Tabular

_LONGEST_SERIES = 512  # steps; the cost of attention is their square
Factory = Callable[[Sequence[int], int], nn.Module]


class SequenceEncoder(nn.Module):
    """The paper's clinical encoder: a bidirectional LSTM, then an LSTM whose last state is the embedding."""

    def __init__(self, features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.first = nn.LSTM(features, hidden, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * hidden, width, batch_first=True)

    def forward(self, sequences: Tensor) -> Tensor:
        """[batch, steps, features] -> [batch, width]."""
        states, _ = self.first(sequences)
        _, (last, _) = self.second(states)
        return last[0]  # type: ignore[no-any-return]


class WithDefault(nn.Module):
    """A model with a learned embedding for records that the party does not have.

    The last feature of a record is 1 if the party lacks it. The other features are the record, flattened.

    Args:
        inner: embeds records [batch, *shape].
        shape: the shape of one record.
        width: the width of the embedding.
    """

    def __init__(self, inner: nn.Module, shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.inner, self._shape = inner, tuple(shape)
        self.default = nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> Tensor:
        """[batch, features] -> [batch, width]."""
        records = features[:, :-1].reshape(len(features), *self._shape)
        return torch.where(features[:, -1:] > 0, self.default, self.inner(records))


class SeriesTransformer(nn.Module):
    """Two transformer layers with learned positions; the embedding is an affine map of the mean step."""

    def __init__(self, steps: int, features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.places = nn.Parameter(0.02 * torch.randn(steps, hidden))
        # Without dropout, a run depends on its seed only: torch's dropout draws from the global generator.
        layers = [
            nn.TransformerEncoderLayer(
                hidden, _heads(hidden), 2 * hidden, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        ]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(hidden, width)

    def forward(self, series: Tensor) -> Tensor:
        """[batch, steps, features] -> [batch, width]."""
        return self.last(self.layers(self.first(series) + self.places).mean(1))  # type: ignore[no-any-return]


def _heads(hidden: int) -> int:
    """Return the number of attention heads: the largest of 4, 2 and 1 that divides the width."""
    return next(count for count in (4, 2, 1) if hidden % count == 0)


def make_embedding(
    settings: EmbeddingSettings,
    shape: Sequence[int],
    width: int,
    inputs: Sequence[Input] = (),
    *,
    record_shape: Sequence[int] | None = None,
) -> nn.Module:
    """Make the embedding model that the settings describe, for features [rows, *shape].

    Args:
        width: the width of the embedding.
        inputs: for a tabular embedding: the column that each feature is a code of.
        record_shape: the shape of one record, if the features are the flattened record and a flag for
            records that the party does not have. None if the features are the record.
    """
    if record_shape is not None and tuple(record_shape) != tuple(shape):
        return WithDefault(_make(settings, record_shape, width, inputs), record_shape, width)
    return _make(settings, shape, width, inputs)


def _make(
    settings: EmbeddingSettings, shape: Sequence[int], width: int, inputs: Sequence[Input]
) -> nn.Module:
    model = settings.model
    if model == "auto":
        model = "tabular" if inputs else {3: "cnn", 2: "lstm"}.get(len(shape), "mlp")
    if model == "linear":
        return linear(shape, width)
    if model == "tabular":
        return tabular(shape, width, settings.hidden or (128, 128), inputs)
    if model in _NETWORKS:
        network, hidden = _NETWORKS[model]
        return network(shape, width, settings.hidden or hidden)
    module = named_factory(model)(shape, width)
    _check_module(module, shape, width, model)
    return module


def tabular(shape: Sequence[int], width: int, hidden: Sequence[int], inputs: Sequence[Input]) -> nn.Module:
    """Return the default network for tables."""
    if not inputs:
        raise ConfigError(
            "VFL-3020",
            "a tabular embedding needs the columns of a table. Found features of shape "
            f'{list(shape)} that are not. Use embedding.model = "auto", or another embedding.',
        )
    return Tabular(inputs, width, hidden)


def linear(shape: Sequence[int], width: int) -> nn.Module:
    """Return one affine layer over all features."""
    size = int(torch.Size(shape).numel())
    layer = nn.Linear(size, width)
    return layer if len(shape) == 1 else nn.Sequential(nn.Flatten(), layer)


def mlp(shape: Sequence[int], width: int, hidden: Sequence[int]) -> nn.Module:
    """Return affine layers with ReLU between them."""
    sizes = [int(torch.Size(shape).numel()), *hidden]
    layers: list[nn.Module] = [] if len(shape) == 1 else [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], width))


def cnn(shape: Sequence[int], width: int, channels: Sequence[int]) -> nn.Module:
    """Return 3x3 convolutions with ReLU, max-pooled after every second one.

    The last convolution has `width` channels, each averaged over the image. The paper's 7-layer CNN has six
    channel counts and the width.
    """
    if len(shape) != 3:
        raise ConfigError(
            "VFL-3011",
            f"a cnn embedding needs images [channels, height, width]. Found features of shape {list(shape)}. "
            'Use a source of images, a data set with partition.layout = "bands", or another embedding.',
        )
    layers: list[nn.Module] = []
    before = shape[0]
    for position, after in enumerate(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        if position % 2:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        before = after
    layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def lstm(shape: Sequence[int], width: int, hidden: Sequence[int]) -> nn.Module:
    """Return a bidirectional LSTM with hidden[0] units, followed by an LSTM with `width` units."""
    if len(shape) != 2:
        raise ConfigError(
            "VFL-3012",
            f"an lstm embedding needs sequences [steps, features]. Found features of shape {list(shape)}. "
            'Use a source of series, a data set with partition.layout = "sequence", or another embedding.',
        )
    return SequenceEncoder(shape[1], hidden[0], width)


def transformer(shape: Sequence[int], width: int, hidden: Sequence[int]) -> nn.Module:
    """Return a small transformer encoder for series of at most 512 steps."""
    if len(shape) != 2 or shape[0] > _LONGEST_SERIES:
        raise ConfigError(
            "VFL-3022",
            f"a transformer embedding needs series [steps, features] of at most {_LONGEST_SERIES} steps. "
            f"Found features of shape {list(shape)}. Use an lstm for longer series, or another embedding.",
        )
    return SeriesTransformer(shape[0], shape[1], hidden[0], width)


def named_factory(name: str) -> Factory:
    """Import the user's `package.module:Factory`, called as Factory(shape, width) -> torch module.

    Importing runs code. Call this only with a name from the user's own configuration or command line, never
    with one that was read from a model folder or received from a peer.

    Raises:
        ConfigError: the factory cannot be imported or called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "VFL-3013",
            f'embedding.model "{name}" must be importable as package.module:Factory. Found: {error}. Install '
            "the package, or add its folder to PYTHONPATH.",
        ) from error
    if not callable(factory):
        raise ConfigError(
            "VFL-3014",
            f'embedding.model "{name}" must be callable as Factory(feature_shape, width). Found an object of '
            f"type {type(factory).__name__}. Use a function or a class.",
        )
    return factory


# Networks that need only hidden sizes: name -> the network, and its default sizes.
_NETWORKS: dict[str, tuple[Callable[[Sequence[int], int, Sequence[int]], nn.Module], Sequence[int]]] = {
    "mlp": (mlp, (64,)),
    "cnn": (cnn, (16, 16, 32, 32, 64, 64)),
    "lstm": (lstm, (16,)),
    "transformer": (transformer, (64,)),
}


def _check_module(module: Any, shape: Sequence[int], width: int, name: str) -> None:
    """Raise ConfigError unless the user's module maps two rows of zeros to the right shape and type."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "VFL-3015",
            f'embedding.model "{name}" must return a torch.nn.Module. Found an object of type '
            f"{type(module).__name__}. Return the module that embeds the features.",
        )
    with torch.no_grad():
        output = module(torch.zeros(2, *shape))
    if list(output.shape) != [2, width] or output.dtype != torch.float32:
        kind = str(output.dtype).removeprefix("torch.")
        raise ConfigError(
            "VFL-3016",
            f'embedding.model "{name}" must map [rows, {", ".join(map(str, shape))}] to [rows, {width}] '
            f"float32. Found output {list(output.shape)} {kind} for 2 rows. Set model.width to the width of "
            "the module's output.",
        )
