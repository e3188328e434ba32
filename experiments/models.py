"""Embedding models that the studies use beside the package's own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vafl.models.embeddings import cnn

CHANNELS = (8, 8, 16, 16, 32, 32)


class ChannelsLast(nn.Module):
    """Lays pictures out as small convolutions on a CPU like them: they take two thirds of the time."""

    def forward(self, pictures: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same."""
        return pictures.contiguous(memory_format=torch.channels_last)


def small_views(shape: Sequence[int], width: int) -> nn.Module:
    """The paper's 7-layer CNN with an eighth of its channels, on views of half their height and width."""
    channels, height, across = shape
    layers = cnn((channels, height // 2, across // 2), width, CHANNELS)
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d):  # torch's own start lets seven layers of ReLU fade to nothing
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    model = nn.Sequential(nn.AvgPool2d(2), ChannelsLast(), *layers.children())
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
