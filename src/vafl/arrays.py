"""The array types of all packages. A name says the dtype and the role; docstrings give the shapes."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

RowIds = npt.NDArray[np.int64]  # numbers of rows, which are records
Integers = npt.NDArray[np.int64]  # other whole numbers: counts, positions, classes, accounts
Iterations = npt.NDArray[np.int32]  # iterations of the server, and delays in iterations
Words = npt.NDArray[np.uint64]  # masked scores: integers modulo 2^64
Bytes = npt.NDArray[np.uint8]
States = npt.NDArray[np.uint8]  # [rows, clients]: indices into `protocol.inquiry.STATES`
Flags = npt.NDArray[np.bool_]

Floats = npt.NDArray[np.float32]  # what models and messages use
Matrix = npt.NDArray[np.float32]  # [rows, width]: embeddings, their gradients, outputs of the head
Doubles = npt.NDArray[np.float64]  # statistics, and sums that must not drift

Block = tuple[slice, slice]  # rows and columns of a matrix

Features = npt.NDArray[np.floating[Any]]  # float32; float64 for columns that are not scaled yet
Labels = npt.NDArray[Any]  # [rows]: class numbers, or floats in a regression
