"""Make runs of an experiment's TOML, and read their parameters along the way."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector

from vafl.config import read_config
from vafl.data.partition import partition
from vafl.data.public import load
from vafl.data.split import Split
from vafl.run.assembly import Run, build


def make_run(path: Path, changes: Sequence[str], seed: int) -> Run:
    """Return the run of the TOML at `path` with these changes. All seeds have the same training rows."""
    config = read_config(path, [*changes, f"seed={seed}"])
    dataset = load(config.data)
    split = Split.of_dataset(dataset, config.data, seed=0)
    data = partition(dataset, split, config.partition, config.data.scale)
    return build(config, data)


def parameters_of(run: Run) -> list[Parameter]:
    """Return the parameters of the clients' models in order, then those of the head."""
    return [parameter for module in (*run.models, run.head) for parameter in module.parameters()]


def point_of(run: Run) -> Tensor:
    """Return all parameters as one vector."""
    return parameters_to_vector(parameters_of(run)).detach().double()


def visit(run: Run, iterations: Sequence[int]) -> Iterator[Tensor]:
    """Advance the run, and yield the parameters at each of these global iterations.

    The last answer may still be under way to its client, so one client's step can be missing.
    """
    for iteration in iterations:
        while run.runtime.updates < iteration:
            run.runtime.advance()
        yield point_of(run)
