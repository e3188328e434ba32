"""Noise on hidden layers (the paper's smoothing), and a check that a model does not mix records."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vafl.errors import ConfigError
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.settings import PrivacySettings


def trained_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold parameters directly, in the order of their registration."""
    return [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]


class HiddenNoise:
    """Add noise between the layers of a model in training mode, which smooths the objective.

    Recurrent layers do not expose their activations, so the noise goes on their output.

    Attributes:
        drawn: the noise that the last forward pass added, one tensor per noisy layer.
        replayed: noise that the next forward passes add instead of drawing new noise, or None. It lets the
            caller differentiate the same function again.
    """

    def __init__(self, model: nn.Module, settings: PrivacySettings, noise: Noise) -> None:
        layers = trained_layers(model)
        deviations = _one_each(settings.layers, len(layers) - 1)
        noisy = [(layer, deviation) for layer, deviation in enumerate(deviations) if deviation]
        self.drawn: list[Tensor] = [torch.empty(0)] * len(noisy)
        self.replayed: Sequence[Tensor] | None = None
        self._draw = noise.uniform if settings.layer_noise == "uniform" else noise.gaussian
        for place, (layer, deviation) in enumerate(noisy):
            if settings.placement == "output":  # after the activation: on the next layer's input
                layers[layer + 1].register_forward_pre_hook(self._on_input(place, deviation))
            else:
                layers[layer].register_forward_hook(self._on_output(place, deviation))

    def _on_output(self, place: int, deviation: float) -> Any:
        def hook(layer: nn.Module, _: object, output: Any) -> Any:
            if not layer.training:
                return output
            if isinstance(output, tuple):
                return (self._add(place, deviation, output[0]), *output[1:])
            return self._add(place, deviation, output)

        return hook

    def _on_input(self, place: int, deviation: float) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
            if layer.training:
                return (self._add(place, deviation, inputs[0]), *inputs[1:])
            return inputs

        return hook

    def _add(self, place: int, deviation: float, values: Tensor) -> Tensor:
        if self.replayed is not None:
            return values + self.replayed[place]
        self.drawn[place] = self._draw(values.shape, deviation)
        return values + self.drawn[place]


def _one_each(deviations: Sequence[float], layers: int) -> Sequence[float]:
    if len(deviations) == 1:
        return [deviations[0]] * layers
    if len(deviations) not in (0, layers):
        raise ConfigError(
            "VFL-5071",
            f"privacy.layers must have one number for each of the {layers} hidden layers, or one number for "
            f"all. Found {len(deviations)} numbers.",
        )
    return deviations


def require_separate_records(model: nn.Module, example: Tensor) -> None:
    """Refuse a model whose embedding of a record depends on the other records of the batch.

    Such a model carries a record into the uploads of other records, where the clip does not bound its effect.

    Args:
        model: the embedding model.
        example: [rows, ...] features of a few records, with any values.

    Raises:
        ConfigError: the model has a batch normalisation layer, or mixes the records of `example`.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            raise ConfigError(
                "VFL-5072",
                f"a private client's model must treat each record separately. Layer {name} is a "
                f"{type(layer).__name__}, which mixes the records of a batch. Use GroupNorm or LayerNorm.",
            )
    # Dropout is random but treats records separately. Disable it, so that two passes are comparable.
    drops = nn.modules.dropout._DropoutNd
    dropping = [layer for layer in model.modules() if isinstance(layer, drops) and layer.training]
    for layer in dropping:
        layer.eval()
    with torch.no_grad():
        together = model(example)
        alone = torch.cat([model(row[None]) for row in example])
    for layer in dropping:
        layer.train()
    rounding = 1e-5 * max(1.0, float(together.abs().max()))
    if not torch.allclose(together, alone, rtol=1e-3, atol=rounding):
        raise ConfigError(
            "VFL-5073",
            "a private client's model must treat each record separately. Its embedding of a record changed "
            f"by {float((together - alone).abs().max()):.3g} when other records were in the batch. Remove "
            "the layers that mix records (normalisation, attention or statistics over the batch).",
        )
