"""The estimators, used as scikit-learn estimators are used."""

import copy
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, recall_score
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from vafl import ConfigError, DataError, Run, VerticalClassifier, VerticalRegressor

WINE = load_wine(return_X_y=True)
BRIEF = {"epochs": 10, "step_size": 0.01, "random_state": 0}


def wine(**parameters):
    return VerticalClassifier(**{"epochs": 3, "random_state": 0, **parameters}).fit(*WINE)


@pytest.mark.no_cover  # some hundred fits
@parametrize_with_checks(
    [VerticalClassifier(**BRIEF), VerticalRegressor(**BRIEF)],
    expected_failed_checks=lambda estimator: {
        "check_sample_weight_equivalence_on_dense_data": "other rows make other minibatches"
    },
)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


@pytest.mark.no_cover
@pytest.mark.parametrize(("embedding", "margin"), [("linear", 0.03), ("tabular", 0.06)])
@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_a_classifier_is_about_as_good_as_logistic_regression(load, embedding, margin):
    """With few rows, a linear model is hard to beat. The default must come close."""
    train, test, y_train, y_test = train_test_split(*load(return_X_y=True), random_state=0)
    ceiling = make_pipeline(StandardScaler(), LogisticRegression()).fit(train, y_train).score(test, y_test)
    model = VerticalClassifier(random_state=0, embedding=embedding).fit(train, y_train)
    assert model.score(test, y_test) > ceiling - margin


@pytest.mark.no_cover
@pytest.mark.parametrize(("embedding", "margin"), [("linear", 0.05), ("tabular", 0.1)])
def test_a_regressor_is_about_as_good_as_ridge_regression(embedding, margin):
    train, test, y_train, y_test = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
    ceiling = make_pipeline(StandardScaler(), Ridge()).fit(train, y_train).score(test, y_test)
    model = VerticalRegressor(random_state=0, embedding=embedding).fit(train, y_train)
    assert model.score(test, y_test) > ceiling - margin


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", ["async", "t-sync", "sync", "centralised"])
def test_every_rule_learns(rule):
    model = wine(rule=rule, epochs=30)
    assert model.score(*WINE) > 0.95
    assert model.n_iter_ == model.run_.runtime.updates == model.run_.config.stop.updates


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "parameters",
    [
        {"embedding": "linear"},
        {"embedding": "mlp", "hidden": (16,)},
        {"embedding": "linear", "head": "linear", "width": 4, "combine": "concat"},
        {"embedding": "linear", "head": "mlp", "head_hidden": (8,)},
        {"delay_bound": 3, "refresh": "none"},
        {"embedding": "linear", "optimiser": "sgd", "step_size": 0.1, "l2": 0.0},
        {"optimiser": "sgd", "step_size": 0.1},
    ],
)
def test_other_models_and_protocols_learn(parameters):
    assert wine(epochs=30, **parameters).score(*WINE) > 0.9


def held_out_labels(data):
    return data.labels[data.held_out]


def test_probabilities_follow_from_decisions():
    X, y = WINE
    three = wine()
    scores = np.exp(three.decision_function(X))
    np.testing.assert_allclose(three.predict_proba(X), scores / scores.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(three.predict(X), three.decision_function(X).argmax(1))
    two = VerticalClassifier(epochs=3, random_state=0).fit(X, np.where(y == 0, "red", "amber"))
    decisions = two.decision_function(X)
    np.testing.assert_allclose(two.predict_proba(X)[:, 1], 1 / (1 + np.exp(-decisions)), rtol=1e-5)
    assert two.classes_.tolist() == ["amber", "red"]
    np.testing.assert_array_equal(two.predict(X), np.where(decisions > 0, "red", "amber"))


def test_the_history_is_of_the_model_that_predicts():
    model = wine()
    assert model.history_[0].updates == 0
    assert model.history_[-1].updates == model.n_iter_
    assert model.history_[-1].metric == pytest.approx(model.score(*WINE))
    regressor = VerticalRegressor(epochs=3, random_state=0).fit(*WINE)
    assert regressor.history_[-1].metric == pytest.approx(regressor.score(*WINE), abs=1e-5)


def test_with_rows_held_out_the_models_of_the_lowest_loss_are_kept():
    X, y = WINE
    model = wine(validation_fraction=0.25, step_size=0.3, l2=0.0, embedding="linear")
    losses = [point.metrics["log_loss"] for point in model.history_]
    assert model.best_ is model.run_.best.evaluation
    assert model.best_.metrics["log_loss"] == min(losses) < losses[-1]
    assert model.run_.evaluator() == model.best_.metrics
    assert wine().best_ is None
    regressor = VerticalRegressor(epochs=3, random_state=0, validation_fraction=0.25).fit(X, y)
    held_out = (
        regressor.run_.data.labels[regressor.run_.data.held_out].numpy() * regressor.target_scale_
        + regressor.target_mean_
    )
    assert regressor.best_.metrics.keys() == {"r2", "rmse", "mae"}
    spread = float(np.sqrt(np.mean((held_out - held_out.mean()) ** 2)))  # errors are in the unit of y
    assert regressor.best_.metrics["rmse"] == pytest.approx(
        spread * (1 - regressor.best_.metric) ** 0.5, rel=1e-4
    )


def test_rows_held_out_of_one_class_have_no_auc():
    X, y = WINE
    rare = np.zeros(len(y), int)
    rare[:2] = 1
    seeds = (VerticalClassifier(epochs=1, random_state=s, validation_fraction=0.1) for s in range(20))
    model = next(model for model in seeds if not held_out_labels(model.fit(X, rare).run_.data).any())
    assert model.best_.metric is model.best_.metrics["auc"] is None
    assert model.best_.metrics["log_loss"] > 0


def test_rows_held_out_are_neither_trained_on_nor_scaled_by():
    X, y = WINE
    model = wine(validation_fraction=0.25, metric="loss", embedding="linear")
    assert model.run_.data.rows == 134
    assert model.run_.data.parts.validation == 44
    for party in model.run_.data.parties:
        assert party.features[model.run_.data.train].quantile(0.5, dim=0).abs().max() < 0.05
        assert party.features[model.run_.data.held_out].quantile(0.5, dim=0).abs().max() > 0.05
    target = VerticalRegressor(epochs=1, random_state=0, validation_fraction=0.25).fit(X, y).run_.data
    assert (
        abs(float(target.labels[target.train].mean()))
        < 1e-6
        < abs(float(target.labels[target.held_out].mean()))
    )


@pytest.mark.parametrize("share", [-0.1, 1.0, "half", None])
def test_the_share_held_out_is_a_share(share):
    with pytest.raises(ConfigError, match="VFL-8503"):
        wine(validation_fraction=share)


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match=r"VFL-8504.*178.*0.*0\.001"):
        wine(validation_fraction=0.001)
    with pytest.raises(DataError, match=r"VFL-8511.*3"):
        VerticalClassifier().fit(np.eye(3), [1, 1, 1])


def test_every_party_has_its_traffic_and_its_delays():
    model = wine(clients=3)
    assert list(model.traffic_) == list(model.delays_) == list(model.parties_)
    assert sum(traffic.bytes_up for traffic in model.traffic_.values()) == model.history_[-1].bytes_up
    assert model.delays_["client-3"].mean > model.delays_["client-1"].mean  # the slowest sleeps longest
    assert wine(rule="centralised").traffic_ == {}


def test_the_unit_of_the_target_does_not_matter():
    X, y = load_diabetes(return_X_y=True)
    plain = VerticalRegressor(epochs=3, random_state=0).fit(X, y).predict(X)
    other = VerticalRegressor(epochs=3, random_state=0).fit(X, 1e4 * y - 7e6).predict(X)
    np.testing.assert_allclose(other, 1e4 * plain - 7e6, rtol=1e-5)


def test_features_far_from_zero_keep_their_precision():
    X, y = WINE
    near = wine().decision_function(X)
    far = VerticalClassifier(epochs=3, random_state=0).fit(X + 1e9, y).decision_function(X + 1e9)
    np.testing.assert_allclose(far, near, atol=1e-4)


def test_without_scaling_features_are_left_as_they_are():
    model = wine(scale=False, embedding="linear")
    np.testing.assert_allclose(model.run_.data.parties[0].features, WINE[0][:, :7].astype(np.float32))


def test_the_random_state_decides_everything():
    X, _ = WINE
    np.testing.assert_array_equal(wine().predict_proba(X), wine().predict_proba(X))
    assert not np.array_equal(wine(random_state=1).predict_proba(X), wine().predict_proba(X))
    assert wine(random_state=None).run_.config.seed != wine(random_state=None).run_.config.seed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_predict_alike_and_carry_no_training_rows(copied):
    model = wine()
    again = copied(model)
    np.testing.assert_array_equal(again.predict_proba(WINE[0]), model.predict_proba(WINE[0]))
    assert isinstance(model.run_, Run)
    assert not hasattr(again, "run_")
    assert (again.traffic_, again.delays_, again.history_) == (model.traffic_, model.delays_, model.history_)


def test_a_saved_model_does_not_grow_with_the_training_rows():
    X, y = WINE
    many = VerticalClassifier(epochs=0.1, random_state=0, validation_fraction=0).fit(
        np.tile(X, (50, 1)), np.tile(y, 50)
    )
    assert len(pickle.dumps(many)) < 1.1 * len(pickle.dumps(wine(epochs=1)))


def test_searches_and_cross_validation_work():
    grid = {"epochs": np.arange(1, 3), "step_size": np.geomspace(0.01, 0.1, 2)}
    search = GridSearchCV(VerticalClassifier(embedding="linear", random_state=0), grid, cv=2).fit(*WINE)
    assert search.best_params_["step_size"] == pytest.approx(0.1)
    assert cross_val_score(clone(search.best_estimator_), *WINE, cv=2).mean() > 0.8


def test_verbose_prints_the_history(capsys):
    model = wine(verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.history_)
    assert lines[-1].startswith(f"{model.n_iter_} updates, ")
    wine()
    assert capsys.readouterr().out == ""


# --- weights ---


def rare(rows=2000, seed=0):
    """Return rows of which 5 % are of class 7 and the others of class 3. Half of the rows are for testing."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(rows, 4))
    chances = 1 / (1 + np.exp(4.2 - X @ [1.5, 1.0, -1.0, 0.5]))
    return train_test_split(
        X, np.where(generator.random(rows) < chances, 7, 3), test_size=0.5, random_state=0
    )


@pytest.mark.no_cover
def test_class_weights_shift_predictions_and_probabilities_stay_right():
    train, test, y_train, y_test = rare()
    model = {"embedding": "linear", "random_state": 0, "validation_fraction": 0.3}
    plain = VerticalClassifier(**model).fit(train, y_train)
    balanced = VerticalClassifier(**model, class_weight="balanced").fit(train, y_train)
    given = VerticalClassifier(**model, class_weight={7.0: np.int64(20)}).fit(train, y_train)
    found = [recall_score(y_test == 7, each.predict(test) == 7) for each in (plain, balanced, given)]
    assert found[0] + 0.2 < min(found[1:])
    assert (plain.calibration_.method, balanced.calibration_.method) == ("none", "platt")
    losses = [log_loss(y_test, each.predict_proba(test)) for each in (plain, balanced, given)]
    assert max(losses) < 1.15 * losses[0]
    copied = pickle.loads(pickle.dumps(balanced))
    np.testing.assert_array_equal(copied.predict_proba(test), balanced.predict_proba(test))


def test_rows_without_weight_teach_nothing():
    X, y = WINE
    wrong = np.random.default_rng(0).random(len(y)) < 0.5
    labels = np.where(wrong, (y + 1) % 3, y)
    model = VerticalClassifier(epochs=30, random_state=0, embedding="linear")
    assert model.fit(X, labels, sample_weight=~wrong).score(X, y) > 0.9
    assert model.fit(X, labels).score(X, y) < 0.9
    single = model.fit(X, y, sample_weight=2.5).predict_proba(X)
    np.testing.assert_allclose(single, model.fit(X, y).predict_proba(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0] * 5, r"VFL-8506.*178.*\(5,\)"),
        ([1.0] * 177 + [-1], r"VFL-8507.*1.*\-1"),
        ([np.nan] + [1.0] * 177, r"VFL-8507.*1.*nan"),
        (["heavy"] * 178, "VFL-8505"),
        ([0.0] * 178, "VFL-3053"),
    ],
)
def test_weights_that_are_no_weights_are_refused(weights, said):
    with pytest.raises(DataError, match=said):
        VerticalClassifier(epochs=3).fit(*WINE, sample_weight=weights)


def test_weights_of_unknown_classes_are_refused():
    with pytest.raises(ConfigError, match=r"VFL-3052.*0, 1, 2.*'9'"):
        wine(class_weight={9: 2.0})
    with pytest.raises(ConfigError, match="VFL-1036"):
        wine(class_weight="balanced_subsample")
    with pytest.raises(ConfigError, match="VFL-3051"):
        VerticalRegressor(epochs=3, class_weight="balanced").fit(*WINE)
