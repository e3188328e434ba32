"""The clients' embedding models: linear, MLP, CNN, LSTM, tabular, or the user's own torch module."""

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vafl.errors import ConfigError
from vafl.models.settings import ModelSettings
from vafl.models.tabular import Input, Tabular

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


def make_embedding(
    settings: ModelSettings, shape: Sequence[int], outputs: int, inputs: Sequence[Input] = ()
) -> nn.Module:
    """Make the embedding model that the settings describe, for features [rows, *shape].

    Args:
        outputs: the number of outputs of the head, which decides the default width.
        inputs: for a tabular embedding: the column that each feature is a code of.
    """
    width = settings.embedding_width(outputs)
    if settings.embedding == "linear":
        return linear(shape, width)
    if settings.embedding == "mlp":
        return mlp(shape, width, settings.hidden or (64,))
    if settings.embedding == "tabular":
        return Tabular(inputs, width, settings.hidden or (128, 128))
    if settings.embedding == "cnn":
        return cnn(shape, width, settings.hidden or (16, 16, 32, 32, 64, 64))
    if settings.embedding == "lstm":
        return lstm(shape, width, settings.hidden or (16,))
    module = named_factory(settings.embedding)(shape, width)
    _check_module(module, shape, width, settings.embedding)
    return module


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
            'Use an image data set with partition.layout = "bands", or another embedding.',
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
            'Use an image or series data set with partition.layout = "sequence", or another embedding.',
        )
    return SequenceEncoder(shape[1], hidden[0], width)


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
            f'model.embedding "{name}" must be importable as package.module:Factory. Found: {error}. Install '
            "the package, or add its folder to PYTHONPATH.",
        ) from error
    if not callable(factory):
        raise ConfigError(
            "VFL-3014",
            f'model.embedding "{name}" must be callable as Factory(feature_shape, width). Found an object of '
            f"type {type(factory).__name__}. Use a function or a class.",
        )
    return factory


def _check_module(module: Any, shape: Sequence[int], width: int, name: str) -> None:
    """Raise ConfigError unless the user's module maps two rows of zeros to the right shape and type."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "VFL-3015",
            f'model.embedding "{name}" must return a torch.nn.Module. Found an object of type '
            f"{type(module).__name__}. Return the module that embeds the features.",
        )
    with torch.no_grad():
        output = module(torch.zeros(2, *shape))
    if list(output.shape) != [2, width] or output.dtype != torch.float32:
        kind = str(output.dtype).removeprefix("torch.")
        raise ConfigError(
            "VFL-3016",
            f'model.embedding "{name}" must map [rows, {", ".join(map(str, shape))}] to [rows, {width}] '
            f"float32. Found output {list(output.shape)} {kind} for 2 rows. Set model.width to the width of "
            "the module's output.",
        )
