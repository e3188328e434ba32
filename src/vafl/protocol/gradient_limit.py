"""A limit on the gradients a client takes from its server.

A server can send any finite gradient. One of norm 1e30 would destroy the client's model in a single step,
whatever the step size. So a client compares each gradient with those it has received before, and scales down
one that is far larger than all of them. Honest gradients vary by small factors between two messages, so the
limit leaves them alone. Weights of rows are an exception: if one row in 10,000 weighs as much as all others
together, some gradients of batches with such a row exceed the limit and are scaled down to it.
"""

import math

import numpy as np

from vafl.arrays import Matrix

_FACTOR = 100.0  # gradients up to this multiple of the largest recent norm are left alone
_FIRST = 1e6  # the limit for the first gradient, which has no earlier ones to compare with
# One message multiplies the largest recent norm by at most this, so a server cannot raise the limit quickly.
_GROWTH = 2.0
_MEMORY = 0.995  # the largest recent norm decays by this factor with each message


class GradientLimit:
    """Scales down gradients that are far larger than the recent ones.

    Attributes:
        scaled: how many gradients were scaled down so far.
        largest: the largest norm received so far.
        usual: the largest recent norm. One message at most doubles it.
    """

    def __init__(self) -> None:
        self.scaled = 0
        self.largest = self.usual = 0.0

    @np.errstate(over="ignore")
    def __call__(self, gradients: Matrix) -> Matrix:
        """Return the gradients of one upload, [batch, width], with a norm within the limit."""
        flat = gradients.ravel()
        norm = math.sqrt(float(flat @ flat))
        if not norm < math.inf:  # the squares overflow float32
            norm = float(np.linalg.norm(flat.astype(np.float64)))
        limit = _FACTOR * self.usual or _FIRST
        self.largest = max(self.largest, norm)
        most = _GROWTH * self.usual or _FIRST
        self.usual = max(min(norm, most), _MEMORY * self.usual)
        if norm <= limit:
            return gradients
        self.scaled += 1
        # In float64: the factor may be below what float32 can hold exactly.
        scaled: Matrix = (gradients * np.float64(limit / norm)).astype(np.float32)
        return scaled
