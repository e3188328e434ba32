"""scikit-learn estimators that train a vertical federation in the simulator. Nothing here is deployed."""

from vafl.estimator.predictors import VerticalClassifier, VerticalRegressor

__all__ = ["VerticalClassifier", "VerticalRegressor"]
