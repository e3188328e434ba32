"""The two estimators: what y means to them, and what they make of the head's outputs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from vafl.data.dataset import Records
from vafl.errors import DataError
from vafl.estimator.fitting import Labels, VerticalEstimator
from vafl.models.metrics import IN_LABEL_UNITS, Metrics
from vafl.models.probabilities import probabilities
from vafl.observe.evaluation import Evaluation

Floats = npt.NDArray[np.floating[Any]]


class VerticalClassifier(ClassifierMixin, VerticalEstimator):  # type: ignore[misc]
    """A classifier over columns that several parties hold, trained by the protocol in the simulator.

    Attributes:
        classes_: the sorted class labels.
        parties_: party -> its columns, by name or position.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn; a dictionary X has no
            `feature_names_in_`.
        n_iter_: steps of the server.
        history_: every vafl.observe.evaluation.Evaluation from the start to the end of training. `metrics`
            of each has every metric.
        best_: the evaluation of the models that were kept, the one with the lowest loss on the held-out rows;
            None if no rows were held out.
        traffic_: party -> bytes it sent and received (vafl.transport.traffic.Traffic).
        delays_: party -> how stale its embeddings were when used (vafl.protocol.staleness.DelaySummary).
        calibration_: how outputs become those of `predict_proba` (vafl.models.probabilities.Calibration).
        models_, head_: the torch modules of the parties and of the server.
        encoders_: party -> how its columns become features (vafl.data.encoding.Encoder); of sequences or
            images, their scale (vafl.data.dataset.Standard) or None.
        run_: the vafl.run.assembly.Run underneath, which holds the training rows; copies and pickles of the
            estimator go without it.
    """

    classes_: Labels

    def predict(self, X: Any) -> Labels:
        """Return the class of each row that the weighted loss favours; without weights the likeliest."""
        decisions = self.decision_function(X)
        best = (decisions > 0).astype(np.int64) if decisions.ndim == 1 else decisions.argmax(axis=1)
        labels: Labels = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class, [rows, classes], calibrated if a class_weight is set."""
        outputs = self._outputs(X)
        return probabilities(self.calibration_(outputs))

    def decision_function(self, X: Any) -> Floats:
        """The log-odds of the second class, [rows], or one score a class, [rows, classes]; not calibrated."""
        outputs = self._outputs(X)
        return (outputs[:, 0] if outputs.shape[1] == 1 else outputs).numpy()

    def _check_labels(self, y: Any) -> Labels:
        labels: Labels = validate_data(self, y=y)
        check_classification_targets(labels)
        return labels

    def _class_weight(self) -> Any:
        """A class is the same whatever its type: 1, 1.0 and True are one."""
        if not isinstance(self.class_weight, Mapping):
            return super()._class_weight()
        names = {label: str(label) for label in self.classes_.tolist()}
        return {
            names.get(label, str(label)): weight.item() if isinstance(weight, np.generic) else weight
            for label, weight in self.class_weight.items()
        }

    def _encode(self, labels: Labels, train: Records) -> tuple[Labels, tuple[str, ...] | None]:
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(np.unique(numbers[train])) < 2:
            raise DataError(
                "VFL-8511",
                f"y must show at least two classes. Found one class among {len(train)} training rows: "
                f"{labels[train[0]]}. Is y the right column?",
            )
        return numbers.astype(np.int64), tuple(map(str, self.classes_.tolist()))


class VerticalRegressor(RegressorMixin, VerticalEstimator):  # type: ignore[misc]
    """A regressor over columns that several parties hold, trained by the protocol in the simulator.

    The target is standardised inside, so that step sizes and l2 mean the same whatever its unit.

    Attributes:
        target_mean_, target_scale_: of the training rows' y.
        parties_, n_features_in_, feature_names_in_, n_iter_, history_, best_, traffic_, delays_, models_,
            head_, encoders_, run_: as those of VerticalClassifier.
    """

    def predict(self, X: Any) -> Floats:
        """The expected value of each row."""
        outputs = self._outputs(X)[:, 0].numpy()
        return outputs.astype(np.float64) * self.target_scale_ + self.target_mean_

    def _check_labels(self, y: Any) -> Labels:
        labels: Labels = validate_data(self, y=y, y_numeric=True)
        return labels.astype(np.float64)

    def _encode(self, labels: Labels, train: Records) -> tuple[Labels, tuple[str, ...] | None]:
        self.target_mean_ = float(labels[train].mean())
        self.target_scale_ = float(labels[train].std()) or 1.0
        return ((labels - self.target_mean_) / self.target_scale_).astype(np.float32), None

    def _in_units(self, point: Evaluation) -> Evaluation:
        headline, scale = Metrics.of("squared", 1, self.metric).headline.name, self.target_scale_
        metrics = {
            name: value * scale if value is not None and name in IN_LABEL_UNITS else value
            for name, value in point.metrics.items()
        }
        return replace(point, metrics=metrics, metric=metrics[headline])
