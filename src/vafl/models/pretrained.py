"""Start an embedding from pretrained parameters, and freeze part of it."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from vafl.errors import ConfigError
from vafl.models.embeddings import WithDefault
from vafl.models.settings import EmbeddingSettings


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
    if settings.train != "all":
        inner.requires_grad_(False)
    if settings.train == "last":
        layers = [layer for layer in inner.modules() if any(True for _ in layer.parameters(recurse=False))]
        for parameter in layers[-1].parameters() if layers else ():
            parameter.requires_grad_(True)
    return model


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
