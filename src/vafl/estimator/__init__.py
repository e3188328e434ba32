"""scikit-learn estimators that train a vertical federation in the simulator, in one process."""

from vafl.estimator.predictors import VerticalClassifier, VerticalRegressor

__all__ = ["VerticalClassifier", "VerticalRegressor"]
