"""SplitNN on NVFlare's Collab API: the data side calls the label side once per training step.

NVFlare sends this file to its sites, so it imports nothing of this repository. The task: an MLP 784-64 |
128-10, batch 64, on random data of MNIST's shape; float16 on the wire, as in NVFlare's own SplitNN example.
Two ways of passing the arrays are timed: `documented` passes tensors and index arrays as arguments, as that
example does; `packed` passes bytes and a list, which spares NVFlare a separate download of every array.
"""

import json
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvflare
import torch
from nvflare.collab import collab
from torch import Tensor, nn

ROWS, FEATURES, WIDTH, HIDDEN, CLASSES, BATCH = 10_000, 784, 64, 128, 10, 64
CALL_TIMEOUT = 30.0
WARM_UP_SECONDS = 2.0

Exchange = Callable[[list[int], Tensor], Tensor]


class Coordinator:
    """NVFlare's server: starts the data side and saves what it measured."""

    @collab.main
    def run(self) -> None:
        limit = collab.get_app_prop("limit")
        signal.alarm(limit)
        (data_side,) = collab.get_clients(["site-1"])
        rates = data_side(timeout=float(limit)).train(collab.get_app_prop("seconds"))
        versions = {
            "nvflare": nvflare.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        Path(collab.get_app_prop("result")).write_text(json.dumps({"rates": rates, "versions": versions}))


class Party:
    """One side: site-1 holds the features and the lower layers, site-2 the labels and the upper layers."""

    @collab.init
    def prepare(self) -> None:
        signal.alarm(collab.get_app_prop("limit"))  # this process ends, whatever happens to the benchmark
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if collab.site_name == "site-1":
            self.features = torch.rand(ROWS, FEATURES)
            self.model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
        else:
            self.labels = torch.randint(CLASSES, (ROWS,))
            self.model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    @collab.publish
    def train(self, seconds: float) -> dict[str, float]:
        """Train in each of the two ways, on the data side; return the steps per second."""
        (label_side,) = collab.get_clients(["site-2"])

        def documented(rows: list[int], activations: Tensor) -> Tensor:
            gradient: Tensor = label_side(timeout=CALL_TIMEOUT).step(np.array(rows), activations)
            return gradient

        def packed(rows: list[int], activations: Tensor) -> Tensor:
            return unpacked(label_side(timeout=CALL_TIMEOUT).packed_step(rows, pack(activations)))

        rates = {}
        for exchange in (documented, packed):
            self._train_for(WARM_UP_SECONDS, exchange)
            rates[exchange.__name__] = self._train_for(seconds, exchange)
        return rates

    def _train_for(self, seconds: float, exchange: Exchange) -> float:
        steps = 0
        begin = now = time.perf_counter()
        while now < begin + seconds:
            rows = torch.randint(ROWS, (BATCH,)).tolist()
            activations = self.model(self.features[rows])
            gradient = exchange(rows, activations.detach().half())
            self.optimiser.zero_grad()
            activations.backward(gradient.float())
            self.optimiser.step()
            steps += 1
            now = time.perf_counter()
        return steps / (now - begin)

    @collab.publish
    def step(self, rows: Any, activations: Tensor) -> Tensor:
        """Make one step of the upper layers, on the label side; return the gradient [batch, width]."""
        entered = activations.float().requires_grad_()
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(self.model(entered), self.labels[torch.as_tensor(rows)])
        torch.autograd.backward(loss)
        self.optimiser.step()
        if entered.grad is None:
            raise RuntimeError("the step left no gradient at the cut")
        return entered.grad.half()

    @collab.publish
    def packed_step(self, rows: list[int], activations: bytes) -> bytes:
        """Make the same step with arrays as bytes."""
        return pack(self.step(rows, unpacked(activations)))


def pack(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def unpacked(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float16).view(BATCH, WIDTH)
