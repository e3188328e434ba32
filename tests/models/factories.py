"""What a user might name as model.embedding = "tests.models.factories:..."."""

import torch
from torch import nn


def scaled(shape, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), width), nn.Tanh())


def too_wide(shape, width):
    return nn.Linear(shape[0], width + 1)


def double(shape, width):
    return nn.Sequential(nn.Linear(shape[0], width), AsDouble())


class AsDouble(nn.Module):
    def forward(self, features):
        return features.double()
