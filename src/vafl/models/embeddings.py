"""The clients' embedding models: linear, MLP, CNN, LSTM, tabular, or any torch module the user names."""

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
        inputs: of a tabular embedding: what each feature is a code of.
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
    """One affine map of all features."""
    size = int(torch.Size(shape).numel())
    layer = nn.Linear(size, width)
    return layer if len(shape) == 1 else nn.Sequential(nn.Flatten(), layer)


def mlp(shape: Sequence[int], width: int, hidden: Sequence[int]) -> nn.Module:
    """Affine layers with ReLU between them."""
    sizes = [int(torch.Size(shape).numel()), *hidden]
    layers: list[nn.Module] = [] if len(shape) == 1 else [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], width))


def cnn(shape: Sequence[int], width: int, channels: Sequence[int]) -> nn.Module:
    """3x3 convolutions with ReLU, halved after every second one; the last gives `width` averages.

    The paper's 7-layer CNN is six channel counts and the width.
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
    """A BiLSTM of hidden[0] units, then an LSTM of `width`."""
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
        ConfigError: It cannot be imported, or cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "VFL-3013",
            f'model.embedding "{name}" must name something importable as package.module:Factory. {error}. '
            "Is the package installed, or its folder on PYTHONPATH?",
        ) from error
    if not callable(factory):
        raise ConfigError(
            "VFL-3014",
            f'model.embedding "{name}" must name something to call as Factory(feature_shape, width). Found '
            f"an object of type {type(factory).__name__}. Name a function or a class.",
        )
    return factory


def _check_module(module: Any, shape: Sequence[int], width: int, name: str) -> None:
    """Try what the user's factory returned on two rows, before anything is built on it."""
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
            f"float32. Found output {list(output.shape)} {kind} for 2 rows. Set model.width to what the "
            "module gives.",
        )
