"""Start an embedding from pretrained parameters or near 0, and freeze part of it."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from vafl.errors import ConfigError
from vafl.models.embeddings import WithDefault
from vafl.models.settings import EmbeddingSettings
from vafl.models.tabular import Tabular

_NEAR_ZERO = 0.01  # not 0: a ReLU after the last layer would never get a gradient


def prepared(model: nn.Module, settings: EmbeddingSettings) -> nn.Module:
    """Load `settings.weights` into the model, freeze what `settings.train` leaves out, and return the model.

    The embedding of records that the party does not have is not part of the pretrained model, and is always
    trained.

    Raises:
        ConfigError: the file cannot be read, or its parameters do not fit the model.
    """
    inner = model.inner if isinstance(model, WithDefault) else model
    if settings.weights:
        _load(inner, Path(settings.weights))
    if settings.train == "all":
        return model
    inner.requires_grad_(False)
    last = _last_layers(inner) if settings.train == "last" else []
    for layer in last:
        layer.requires_grad_(True)
    for layer in inner.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer not in last:
            layer.register_forward_pre_hook(_use_kept_statistics)
    return model


def _use_kept_statistics(layer: nn.Module, inputs: tuple[object, ...]) -> None:
    """Let a frozen layer normalise by the statistics that it has, and not by those of each batch."""
    layer.eval()


@torch.no_grad()
def start_near_zero(model: nn.Module) -> None:
    """Scale the model's last layers so that its embeddings are close to 0 at first. Keep frozen ones."""
    inner = model.inner if isinstance(model, WithDefault) else model
    for layer in _last_layers(inner):
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.mul_(_NEAR_ZERO)


def _last_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that make the embedding: of any module, its last layer with parameters."""
    if isinstance(model, Tabular):
        return [model.network[-1], model.linear]  # they are parallel
    layers = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    return layers[-1:]


def _load(model: nn.Module, path: Path) -> None:
    """Copy the parameters in the file into the model. Those that the file lacks keep their values."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            "VFL-3023",
            f'embedding.weights must be a safetensors file. Found "{path}": {error}. Correct the path, or '
            "write the file with safetensors.torch.save_file.",
        ) from error
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name not in state:
            raise ConfigError(
                "VFL-3024",
                f'embedding.weights: "{path}" must hold parameters of the model only. Found "{name}"; the '
                f"model has {', '.join(list(state)[:8])}. Rename it or leave it out of the file.",
            )
        if tensor.shape != state[name].shape:
            raise ConfigError(
                "VFL-3025",
                f'embedding.weights: "{name}" must have the shape {list(state[name].shape)}. Found '
                f'{list(tensor.shape)} in "{path}". Leave it out of the file to train it from new, or change '
                "embedding.hidden or model.width.",
            )
    if not tensors:
        raise ConfigError(
            "VFL-3026", f'embedding.weights: "{path}" must hold parameters of the model. Found none.'
        )
    model.load_state_dict(tensors, strict=False)
