"""All forms of X: which party gets which columns, and what is refused."""

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import polars as pl
import pytest

from vafl import ConfigError, DataError, VerticalClassifier, VerticalRegressor

ROWS = 12
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 5))
LABELS = np.arange(ROWS) % 2
NAMES = ["pay_1", "age", "pay_2", "dose[mg]", "bmi"]


def classifier(**parameters):
    return VerticalClassifier(epochs=1, random_state=0, **parameters)


def frame(library):
    columns = dict(zip(NAMES, NUMBERS.T, strict=True))
    return {"pandas": pd.DataFrame, "polars": pl.DataFrame}[library](columns)


def by_party(rows=slice(None)):
    return {"bank": NUMBERS[rows, :2], "shop": NUMBERS[rows, 2:]}


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        (1, {"client-1": [0, 1, 2, 3, 4]}),
        (2, {"client-1": [0, 1, 2], "client-2": [3, 4]}),
        (9, {f"client-{number}": [number - 1] for number in range(1, 6)}),
    ],
)
def test_without_wishes_the_columns_are_shared_evenly(clients, expected):
    assert classifier(clients=clients).fit(NUMBERS, LABELS).parties_ == expected


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_parties_take_columns_of_a_frame_by_name_pattern_or_position(library):
    parties = {"bank": ["pay_*"], "shop": "age", "hospital": ["dose[mg]", 4]}
    model = classifier(parties=parties).fit(frame(library), LABELS)
    assert model.parties_ == {"bank": ["pay_1", "pay_2"], "shop": ["age"], "hospital": ["dose[mg]", "bmi"]}
    assert model.feature_names_in_.tolist() == NAMES
    assert model.n_features_in_ == 5


def test_parties_take_columns_of_an_array_by_position():
    model = classifier(parties={"bank": range(2), "shop": np.array([4, 2])}).fit(NUMBERS, LABELS)
    assert model.parties_ == {"bank": [0, 1], "shop": [4, 2]}
    assert [party.features.shape[1] for party in model.run_.data.parties] == [2, 2]


def test_one_column_needs_no_list():
    assert classifier(parties={"bank": 0, "shop": [1, 2]}).fit(NUMBERS, LABELS).parties_ == {
        "bank": [0],
        "shop": [1, 2],
    }


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_column_nobody_claims_may_hold_anything(library):
    plain = frame(library)
    words = ["x"] * ROWS
    named = plain.assign(name=words) if library == "pandas" else plain.with_columns(pl.Series("name", words))
    parties = {"bank": ["pay_*"], "shop": ["age"]}
    expected = classifier(parties=parties).fit(plain, LABELS).decision_function(plain)
    found = classifier(parties=parties).fit(named, LABELS).decision_function(named)
    np.testing.assert_array_equal(found, expected)


def test_the_same_split_gives_the_same_model_in_every_form():
    positions = {"bank": [0, 1], "shop": [2, 3, 4]}
    names = {"bank": NAMES[:2], "shop": NAMES[2:]}
    expected = classifier(parties=positions).fit(NUMBERS, LABELS).decision_function(NUMBERS)
    for library in ("pandas", "polars"):
        X = frame(library)
        found = classifier(parties=names).fit(X, LABELS).decision_function(X)
        np.testing.assert_array_equal(found, expected)
        split = {party: X[own] for party, own in names.items()}
        found = classifier().fit(split, LABELS).decision_function(split)
        np.testing.assert_array_equal(found, expected)
    found = classifier().fit(by_party(), LABELS).decision_function(by_party())
    np.testing.assert_array_equal(found, expected)


def test_a_dictionary_says_who_holds_what():
    X = {"bank": frame("pandas")[["age", "bmi"]], "shop": NUMBERS[:, :3]}
    model = classifier().fit(X, LABELS)
    assert model.parties_ == {"bank": ["age", "bmi"], "shop": [0, 1, 2]}
    assert model.n_features_in_ == 5
    assert not hasattr(model, "feature_names_in_")


def test_the_parties_of_a_dictionary_may_come_in_any_order():
    model = classifier().fit(by_party(), LABELS)
    turned = dict(reversed(by_party().items()))
    np.testing.assert_array_equal(model.predict_proba(turned), model.predict_proba(by_party()))


def test_a_fit_forgets_the_form_of_the_fit_before():
    model = classifier().fit(frame("pandas"), LABELS).fit(by_party(), LABELS)
    assert not hasattr(model, "feature_names_in_")
    assert len(model.predict(by_party(slice(3)))) == 3
    assert len(model.fit(NUMBERS, LABELS).predict(NUMBERS)) == ROWS


def test_a_dictionary_may_hold_sequences():
    sequences = {"bank": np.random.default_rng(1).normal(size=(ROWS, 4, 2)), "shop": NUMBERS[:, :, None]}
    model = VerticalRegressor(embedding="lstm", epochs=1, random_state=0).fit(sequences, LABELS)
    assert model.n_features_in_ == 4 * 2 + 5
    assert np.isfinite(model.predict(sequences)).all()
    with pytest.raises(DataError, match=r"VFL-8534.*shop.*rows of shape \[5, 1\].*5 columns"):
        model.predict({**sequences, "shop": NUMBERS})


@pytest.mark.parametrize(
    ("parties", "error", "message"),
    [
        ({"bank": [5]}, DataError, r"VFL-8541.*bank.*4.*5"),
        ({"bank": [-1]}, DataError, r"VFL-8541.*\-1"),
        ({"bank": [0.5]}, DataError, r"VFL-8541.*0\.5"),
        ({"bank": [True, False, True]}, DataError, r"VFL-8541.*True"),
        ({"bank": ["income"]}, DataError, r"VFL-2084.*parties\.bank.*income"),
        ({"bank": [0, 1], "shop": [1]}, DataError, r"VFL-2082.*1.*bank.*shop"),
        ({"bank": None}, DataError, r"VFL-8541.*None"),
        ({"bank": np.array(2)}, DataError, r"VFL-8541.*array\(2\)"),
        ({"bank": []}, DataError, r"VFL-2081.*parties\.bank"),
        ({}, ConfigError, "VFL-8540"),
        ([[0], [1]], ConfigError, "VFL-8540"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(parties, error, message):
    with pytest.raises(error, match=message):
        classifier(parties=parties).fit(NUMBERS, LABELS)


@pytest.mark.parametrize("clients", [0, 1.5, "two"])
def test_the_number_of_clients_is_a_whole_number(clients):
    with pytest.raises(ConfigError, match="VFL-8539"):
        classifier(clients=clients).fit(NUMBERS, LABELS)


def test_a_dictionary_leaves_nothing_to_split():
    with pytest.raises(ConfigError, match="VFL-8502"):
        classifier(parties={"bank": [0]}).fit(by_party(), LABELS)
    with pytest.raises(DataError, match="VFL-8531"):
        classifier().fit({}, LABELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shop": None}, r'VFL-8532.*shop.*"bank"'),
        ({"shops": NUMBERS}, r'VFL-8533.*shops.*Did you mean "shop"\?'),
        ({"customs": NUMBERS}, r"VFL-8533.*customs.*Leave it out\."),
        ({"bank": NUMBERS}, r"VFL-8534.*bank.*2 columns.*5 columns"),
        ({"bank": NUMBERS[:3, :2]}, r'VFL-8545.*3 of "bank", 12 of "shop"'),
        ({"bank": np.full((ROWS, 2), np.inf)}, r"contains infinity"),
        ({"bank": NUMBERS[:, 0]}, r"VFL-8534.*bank.*2 columns"),
    ],
)
def test_prediction_needs_the_tables_of_fit(change, message):
    model = classifier().fit(by_party(), LABELS)
    X = {party: table for party, table in {**by_party(), **change}.items() if table is not None}
    with pytest.raises(ValueError, match=message):
        model.predict(X)


def test_prediction_needs_the_columns_of_fit_in_their_order():
    X = {"bank": frame("polars")}
    model = classifier().fit(X, LABELS)
    with pytest.raises(DataError, match=r"VFL-8535.*bmi.*pay_1"):
        model.predict({"bank": X["bank"][NAMES[::-1]]})


def test_prediction_needs_the_form_of_fit():
    with pytest.raises(DataError, match=r"VFL-8537.*ndarray"):
        classifier().fit(by_party(), LABELS).predict(NUMBERS)
    with pytest.raises(DataError, match="VFL-8538"):
        classifier().fit(NUMBERS, LABELS).predict(by_party())


def test_y_needs_a_label_for_each_row():
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        classifier().fit(by_party(), LABELS[:5])


@pytest.mark.parametrize("kind", [VerticalClassifier, VerticalRegressor])
@pytest.mark.parametrize(
    "y",
    [
        ["no", None, *["no", "yes"] * 5],
        pl.Series(["no", None, *["no", "yes"] * 5]),
        pd.Series([0, pd.NA, *[0, 1] * 5], dtype=object),
        pd.Series(["no", pd.NA, *["no", "yes"] * 5], dtype="string"),
        [0, object(), *[0, 1] * 5],
        [b"no", b"yes"] * 6,
    ],
)
def test_y_that_holds_no_labels_is_a_value_error(kind, y):
    with pytest.raises(ValueError):  # noqa: PT011 - some are scikit-learn's, in its words
        kind(epochs=1).fit(NUMBERS, y)


def test_y_with_gaps_is_refused_with_a_remedy():
    with pytest.raises(DataError, match="VFL-8501"):
        classifier().fit(NUMBERS, ["no", None, *["no", "yes"] * 5])


def mixed(library, rows=ROWS):
    """Return a table with text, categories, truth values, dates and gaps."""
    columns = {
        "colour": [["red", "green", None][row % 3] for row in range(rows)],
        "since": [datetime(2026, 1, 1 + row % 28, tzinfo=UTC) for row in range(rows)],
        "member": [row % 2 == 0 for row in range(rows)],
        "income": [None if row % 5 == 0 else row % 7 + 0.5 for row in range(rows)],
        "size": [["s", "m", "l"][row % 3] for row in range(rows)],
        "empty": [None] * rows,
    }
    if library == "polars":
        return pl.DataFrame(columns).with_columns(pl.col("size").cast(pl.Categorical))
    return pd.DataFrame(columns).astype({"size": "category", "income": "Float64"})


@pytest.mark.parametrize("embedding", ["tabular", "linear"])
def test_text_categories_dates_and_gaps_are_encoded_alike_in_every_frame(embedding):
    found = {}
    for library in ("pandas", "polars"):
        X = mixed(library)
        parties = {"bank": ["colour", "since", "empty"], "shop": ["member", "income", "size"]}
        model = classifier(parties=parties, embedding=embedding).fit(X, LABELS)
        found[library] = model.decision_function(X)
        assert [column.name for column in model.encoders_["bank"].columns] == ["colour", "since"]
        kinds = [column.kind for column in model.encoders_["shop"].columns]
        assert kinds == ["number", "number", "category"]
    np.testing.assert_array_equal(found["pandas"], found["polars"])


def test_categories_that_fit_never_saw_and_new_gaps_can_be_predicted():
    X = mixed("polars")
    model = classifier().fit(X, LABELS)
    other = X.with_columns(
        colour=pl.lit("mauve"),
        income=pl.lit(None),
        since=pl.lit(None),
        member=pl.lit(None),
        size=pl.lit("xl"),
    )
    assert np.isfinite(model.predict_proba(other)).all()


def test_gaps_of_an_array_are_missing_values():
    gaps = NUMBERS.copy()
    gaps[::3, 1] = np.nan
    model = classifier().fit(gaps, LABELS)
    assert [column.flags_missing for column in model.encoders_["client-1"].columns] == [False, True, False]
    assert np.isfinite(model.predict_proba(np.full((2, 5), np.nan))).all()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_column_that_no_model_can_learn_from_is_named(library):
    kind = {"pandas": pd.DataFrame, "polars": pl.DataFrame}[library]
    with pytest.raises(DataError, match=r"VFL-8542.*odd.*bank"):
        classifier().fit({"bank": kind({"age": LABELS, "odd": [[1]] * ROWS}), "shop": NUMBERS}, LABELS)
    names = [f"name {row}" for row in range(60)]
    with pytest.raises(DataError, match=r"VFL-2201.*bank"):
        classifier().fit({"bank": kind({"who": names}), "shop": np.ones((60, 1))}, np.arange(60) % 2)


def test_constants_and_whole_numbers_in_a_row_are_features_if_the_caller_says_so():
    X = np.stack([np.arange(60), np.ones(60)], axis=1)
    model = VerticalRegressor(random_state=0).fit(X, 3 * np.arange(60.0))
    assert [len(own.columns) for own in model.encoders_.values()] == [1, 1]
    assert model.score(X, 3 * np.arange(60.0)) > 0.9


def test_arrays_of_images_or_sequences_need_a_model_of_those():
    with pytest.raises(ConfigError, match=r"VFL-8544.*\[4, 2\].*bank"):
        classifier().fit({"bank": np.zeros((ROWS, 4, 2)), "shop": NUMBERS}, LABELS)


def test_rows_that_pandas_knows_to_be_in_another_order_are_refused():
    bank = frame("pandas")
    for shop in (bank[::-1], bank.sample(frac=1, random_state=0)):
        with pytest.raises(DataError, match=r"VFL-8546.*bank.*shop"):
            classifier().fit({"bank": bank, "shop": shop}, LABELS)
    named = bank.set_index(pd.Index([f"P{row}" for row in range(ROWS)]))
    classifier().fit({"bank": bank, "shop": named, "hospital": NUMBERS}, LABELS)


def test_a_lazy_frame_is_to_be_collected_first():
    lazy = frame("polars").lazy()
    for X in (lazy, {"bank": lazy}):
        with pytest.raises(DataError, match=r"VFL-8536.*LazyFrame"):
            classifier().fit(X, LABELS)
