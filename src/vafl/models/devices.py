"""The border between the protocol, which computes on the CPU, and a device that computes embeddings.

`on_device` is the only place where tensors cross it: records go in, embeddings come out, and autograd carries
gradients back the same way. Outside, the model maps CPU tensors to CPU tensors. Its parameters keep their
names, so a model that was trained on one device is loaded on any other.

Modes that add noise split a model, and compute gradients per record in numpy. They need it on the CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vafl.errors import ConfigError
from vafl.models.settings import EmbeddingSettings


def on_device(model: nn.Module, settings: EmbeddingSettings, *, adds_noise: bool = False) -> nn.Module:
    """Move the model to the device that the settings choose, and return it.

    Args:
        adds_noise: whether the party's privacy mode adds noise.

    Raises:
        ConfigError: this machine does not have the device, or the privacy mode needs the CPU.
    """
    name = settings.device
    if name == "auto":
        name = _accelerator() if settings.is_heavy and not adds_noise else "cpu"
    if name == "cpu":
        return model
    if adds_noise:
        raise ConfigError(
            "VFL-3028",
            f'a privacy.mode that adds noise needs embedding.device = "auto" or "cpu". Found "{name}". '
            "Remove it.",
        )
    device = torch.device(name)
    if not _is_present(device):
        raise ConfigError(
            "VFL-3027",
            f'embedding.device must be a device of this machine. Found "{name}", which torch cannot use '
            'here. Use "auto" or "cpu", or install a torch build for that device.',
        )
    return moved(model, device)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, and make it take and return tensors on the CPU."""
    model.to(device)
    model.register_forward_pre_hook(_Enter(device))
    model.register_forward_hook(_leave)
    return model


@dataclass(frozen=True)
class _Enter:
    """Moves the inputs of a model to its device. It is a class, so that models can be pickled."""

    device: torch.device

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.to(self.device) for value in inputs)


def _leave(module: nn.Module, inputs: tuple[Any, ...], embeddings: Tensor) -> Tensor:
    return embeddings.cpu()


def _accelerator() -> str:
    """Return the device of this machine that computes large models fastest."""
    return next((name for name in ("cuda", "mps") if _is_present(torch.device(name))), "cpu")


def _is_present(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "mps" and torch.backends.mps.is_available()
