"""The classifier and the regressor: how they encode y, and how they turn outputs into predictions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from vafl.arrays import Doubles, Labels, RowIds
from vafl.errors import DataError
from vafl.estimator.fitting import VerticalEstimator
from vafl.models.metrics import IN_LABEL_UNITS, Metrics
from vafl.models.probabilities import probabilities
from vafl.observe.evaluation import Evaluation


class VerticalClassifier(ClassifierMixin, VerticalEstimator):  # type: ignore[misc]
    """A classifier over columns that several parties hold, trained by the protocol in the simulator.

    Attributes:
        classes_: the sorted class labels.
        parties_: party -> its columns, by name or position.
        n_features_in_, feature_names_in_: as in every scikit-learn estimator. With a dictionary X there is no
            `feature_names_in_`.
        n_iter_: the number of server steps.
        history_: the evaluations during training, in order (vafl.observe.evaluation.Evaluation). Each has
            every metric in `metrics`.
        best_: the evaluation of the kept models, which have the lowest loss on the held-out rows; None if no
            rows were held out.
        traffic_: party -> the bytes it sent and received (vafl.transport.traffic.Traffic).
        delays_: party -> how stale its embeddings were when used (vafl.protocol.staleness.DelaySummary).
        calibration_: the map from outputs to calibrated outputs, which `predict_proba` uses
            (vafl.models.probabilities.Calibration).
        models_, head_: the torch modules of the parties and of the server.
        encoders_: party -> its fitted encoder (vafl.data.encoding.Encoder); for sequences or images, the
            fitted scale (vafl.data.dataset.Standard), or None if they are not scaled.
        run_: the underlying vafl.run.assembly.Run, which holds the training rows. Copies and pickles of the
            estimator leave it out.
    """

    classes_: Labels

    def predict(self, X: Any) -> Labels:
        """Return the class of each row with the highest output. Class weights shift this choice."""
        decisions = self.decision_function(X)
        best = (decisions > 0).astype(np.int64) if decisions.ndim == 1 else decisions.argmax(axis=1)
        labels: Labels = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Doubles:
        """Return the probability of each class, [rows, classes], calibrated if a class_weight is set."""
        outputs = self._outputs(X)
        return probabilities(self.calibration_(outputs))

    def decision_function(self, X: Any) -> Doubles:
        """Return uncalibrated log-odds of the second class [rows], or one score per class [rows, classes]."""
        outputs = self._outputs(X)
        return (outputs[:, 0] if outputs.shape[1] == 1 else outputs).numpy()

    def _check_labels(self, y: Any) -> Labels:
        labels: Labels = validate_data(self, y=y)
        check_classification_targets(labels)
        return labels

    def _class_weight(self) -> Any:
        """Return `class_weight` by class name. The keys 1, 1.0 and True mean the same class."""
        if not isinstance(self.class_weight, Mapping):
            return super()._class_weight()
        names = {label: str(label) for label in self.classes_.tolist()}
        return {
            names.get(label, str(label)): weight.item() if isinstance(weight, np.generic) else weight
            for label, weight in self.class_weight.items()
        }

    def _encode(self, labels: Labels, train: RowIds) -> tuple[Labels, tuple[str, ...] | None]:
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(np.unique(numbers[train])) < 2:
            raise DataError(
                "VFL-8511",
                f"y must contain at least two classes. Found one class in {len(train)} training rows: "
                f"{labels[train[0]]}. Check that y is the right column.",
            )
        return numbers.astype(np.int64), tuple(map(str, self.classes_.tolist()))


class VerticalRegressor(RegressorMixin, VerticalEstimator):  # type: ignore[misc]
    """A regressor over columns that several parties hold, trained by the protocol in the simulator.

    The target is standardised internally, so that step sizes and l2 do not depend on its unit.

    Attributes:
        target_mean_, target_scale_: mean and standard deviation of y in the training rows.
        parties_, n_features_in_, feature_names_in_, n_iter_, history_, best_, traffic_, delays_, models_,
            head_, encoders_, run_: as in VerticalClassifier.
    """

    def predict(self, X: Any) -> Doubles:
        """Return the predicted value of each row, [rows]."""
        outputs = self._outputs(X)[:, 0].numpy()
        return outputs.astype(np.float64) * self.target_scale_ + self.target_mean_

    def _check_labels(self, y: Any) -> Labels:
        labels: Labels = validate_data(self, y=y, y_numeric=True)
        return labels.astype(np.float64)

    def _encode(self, labels: Labels, train: RowIds) -> tuple[Labels, tuple[str, ...] | None]:
        self.target_mean_ = float(labels[train].mean())
        self.target_scale_ = float(labels[train].std()) or 1.0
        return ((labels - self.target_mean_) / self.target_scale_).astype(np.float32), None

    def _in_units(self, evaluation: Evaluation) -> Evaluation:
        headline, scale = Metrics.of("squared", 1, self.metric).headline.name, self.target_scale_
        metrics = {
            name: value * scale if value is not None and name in IN_LABEL_UNITS else value
            for name, value in evaluation.metrics.items()
        }
        return replace(evaluation, metrics=metrics, metric=metrics[headline])
