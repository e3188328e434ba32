"""Examples of user factories for embedding.model = "tests.models.factories:..."."""

import torch
from torch import nn


def scaled(shape, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), width), nn.Tanh())


def on_frozen(shape, width):
    """Return a frozen public encoder, like a pretrained model, and a layer to train on it."""
    encoder = nn.Linear(int(torch.Size(shape).numel()), 2)
    nn.init.constant_(encoder.weight, 0.5)
    nn.init.zeros_(encoder.bias)
    return nn.Sequential(nn.Flatten(), encoder.requires_grad_(False), nn.Tanh(), nn.Linear(2, width))


def too_wide(shape, width):
    return nn.Linear(shape[0], width + 1)


def double(shape, width):
    return nn.Sequential(nn.Linear(shape[0], width), AsDouble())


class AsDouble(nn.Module):
    def forward(self, features):
        return features.double()


def no_module(shape, width):
    return width


NOT_CALLABLE = "text"
