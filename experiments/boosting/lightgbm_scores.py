"""Train LightGBM on the arrays of a file, and save its predictions for the test rows.

python lightgbm_scores.py classification|regression ARRAYS.npz SCORES.npy
"""

import sys

import lightgbm
import numpy as np

task, given, found = sys.argv[1:]
arrays = np.load(given)
kind = lightgbm.LGBMRegressor if task == "regression" else lightgbm.LGBMClassifier
model = kind(random_state=0, n_jobs=1, verbose=-1)
categories = np.flatnonzero(arrays["is_category"]).tolist()
model.fit(arrays["train"], arrays["labels"], categorical_feature=categories)
if task == "regression":
    scores = model.predict(arrays["test"])
else:
    scores = model.predict_proba(arrays["test"])
    scores = scores[:, 1] if scores.shape[1] == 2 else scores
np.save(found, scores)
