"""The base class of the classifier and the regressor: parameters, `fit`, and the head's outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from vafl.arrays import Doubles, Labels, RowIds
from vafl.data.encoding import Encoder, Form
from vafl.data.partition import Party, VerticalData
from vafl.data.settings import DataSettings
from vafl.data.split import Parts, Split
from vafl.errors import ConfigError, DataError
from vafl.estimator.settings import make_config
from vafl.estimator.tables import (
    DTYPES,
    OwnTables,
    PartyRows,
    SharedTable,
    check_form,
    check_in_memory,
    encode,
    fit_encoder,
    is_dictionary,
)
from vafl.models.metrics import as_text
from vafl.observe.evaluation import Evaluation
from vafl.run.assembly import Run, build
from vafl.run.conclusion import conclude
from vafl.run.evaluator import outputs

_FEW_ROWS = 200  # with fewer rows, validation_fraction = "auto" holds none out
_HELD_OUT = 0.1  # share of rows that "auto" holds out otherwise


class VerticalEstimator(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """A model over columns that several parties hold, trained by the protocol in the simulator."""

    n_features_in_: int
    _layout: SharedTable | OwnTables

    def __init__(
        self,
        *,
        parties: Mapping[str, Any] | None = None,
        clients: int = 2,
        rule: str = "async",
        t: int = 2,
        delay_bound: int = 0,
        refresh: str = "lookahead",
        embedding: str = "tabular",
        width: int = 0,
        hidden: tuple[int, ...] = (),
        head: str | None = None,
        head_hidden: tuple[int, ...] = (64,),
        combine: str | None = None,
        batch_size: int = 0,
        epochs: float = 0,
        optimiser: str | None = None,
        step_size: float | None = None,
        l2: float | None = None,
        delays: str | dict[str, Any] = "poisson",
        scale: bool = True,
        metric: str = "auto",
        class_weight: str | Mapping[Any, float] | None = None,
        validation_fraction: float | str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        """Set the parameters. The defaults are those of `vafl run` on a table and need no tuning.

        Parameters that are None or 0 get a default that depends on the embedding and the number of rows. For
        embeddings other than `tabular`, the defaults give logistic or ridge regression on the sum of the
        embeddings.

        Args:
            parties: {party: columns}. A column is a name, a pattern such as `pay_*`, or a position. Columns
                of no party are left out. None divides the columns evenly. Leave it out if X is a dictionary
                {party: table}.
            clients: the number of parties that divide the columns evenly. At most one per column is used.
            rule: when the server steps: `async` on every upload, `t-sync` when `t` different clients have
                uploaded, `sync` when all have. `centralised` trains on all columns in one place.
            t: the number of clients that a `t-sync` step waits for.
            delay_bound: the greatest age, in updates, of an embedding that a step may use. 0 means no bound.
            refresh: which rows a client uploads in addition to its batch: `lookahead` (those that other
                clients will use next), `none` (Algorithm 1 as published), `all`, or `random:R`.
            embedding: each party's model: `tabular`, `linear`, `mlp` or `package.module:Factory`; `lstm` or
                `cnn` for arrays of sequences or images in a dictionary X.
            width: the width of an embedding. 0 means the number of outputs for a `bias` head, 32
                for a `tabular` head and 16 for other heads.
            hidden: the hidden units of the embedding. () chooses the default of its kind, (64,) for `mlp`.
            head: the server's model: `tabular`, `bias` (the sum of the embeddings and a bias), `linear`,
                `mlp` or `gated`. None chooses `tabular` for a tabular embedding and `bias` otherwise.
            head_hidden: the hidden units of a `tabular`, `mlp` or `gated` head.
            combine: whether the head takes the `sum` or the `concat`enation of the embeddings. None chooses
                `concat` for a tabular embedding and `sum` otherwise.
            batch_size: the rows of a batch, at most all rows. 0 chooses 64 to 1024 by the number of rows for
                a tabular embedding, and 32 otherwise.
            epochs: passes over the rows, averaged over the clients; a slow client makes fewer. 0 chooses 40
                for a tabular embedding, fewer for many rows, and 30 for other embeddings.
            optimiser: `sgd` or a class of torch.optim, for every party and the head. None chooses `AdamW`
                with weight decay for a tabular embedding and `Adam` otherwise. With a tabular embedding, the
                step size falls to 0 along a cosine for any optimiser.
            step_size: the step size of the optimiser. None chooses 0.002 for a tabular embedding and 0.01
                otherwise.
            l2: the coefficient of each party's regulariser l2/2 |theta_m|^2. None chooses 0 for a tabular
                embedding and 0.001 otherwise.
            delays: how long clients sleep, in simulated time: `poisson`, `exponential`, `poisson-process`,
                `fixed` or `none`. Or a dictionary with the keys of vafl.simulation.delays.DelaySettings,
                such as {"kind": "fixed", "seconds": [1.0, 1.0, 10.0]}.
            scale: whether each party scales its columns, based on its own training rows.
            metric: the headline metric of the history, as in model.metric of a configuration. `auto` chooses
                auc for two classes, accuracy for more, and r2 for numbers. The history has all metrics.
            class_weight: for a classifier: the weight of each class in the training loss. `balanced` gives
                every class the same total weight. A dictionary {class: weight} leaves other classes at 1.
                None weights all rows equally. `predict` follows the weighted loss. `predict_proba` returns
                the probabilities without weights, calibrated on the held-out rows if these have two classes.
            validation_fraction: the share of rows held out of training to measure the history. The models
                with the lowest loss on them are kept. A tabular embedding stops training when that loss no
                longer improves. With 0, the history is measured on the training rows, and the last models
                are kept. `auto` means 0.1, or 0 for fewer than 200 rows.
            random_state: the seed of models, batches, delays and held-out rows. None draws a new seed.
            verbose: whether to print each evaluation during training.
        """
        self.parties = parties
        self.clients = clients
        self.rule = rule
        self.t = t
        self.delay_bound = delay_bound
        self.refresh = refresh
        self.embedding = embedding
        self.width = width
        self.hidden = hidden
        self.head = head
        self.head_hidden = head_hidden
        self.combine = combine
        self.batch_size = batch_size
        self.epochs = epochs
        self.optimiser = optimiser
        self.step_size = step_size
        self.l2 = l2
        self.delays = delays
        self.scale = scale
        self.metric = metric
        self.class_weight = class_weight
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X and y.

        Args:
            X: one table, or {party: table} with the same rows in the same order. A table is a pandas or
                polars DataFrame, or an array. Columns of a DataFrame may hold numbers, text, categories,
                booleans and dates. Values may be missing.
            y: [rows], the labels.
            sample_weight: [rows], the weight of each row in the training loss, 0 or more. None weights all
                rows equally. The history is not weighted.

        Raises:
            ValueError: a parameter, X or y is wrong. It is a ConfigError, a DataError or scikit-learn's own.
            Diverged: the loss is no longer finite. Try a smaller step_size.
        """
        labels = self._labels(y)
        tables = self._tables(X, fitting=True)
        check_consistent_length(*(np.empty(len(table)) for table in tables.values()), labels)
        weights = _weights(sample_weight, len(labels))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        split = self._split(len(labels), seed)
        numbers, classes = self._encode(labels, split.order[: split.parts.train])
        held_out = split.parts.validation > 0
        parameters = {**self.get_params(deep=False), "class_weight": self._class_weight()}
        config = make_config(parameters, seed=seed, rows=split.parts.train, held_out=held_out)
        data = self._share_out(tables, numbers, classes, split)
        if weights is not None:
            data = replace(data, weights=torch.from_numpy(weights[split.order]))
        run = build(config, data)
        history = run.train(self._report, keep_best=held_out)
        self.history_ = list(map(self._in_units, history))
        best = run.best and run.best.evaluation
        self.best_ = self._in_units(best) if best else None
        self._keep(run)
        return self

    def _labels(self, y: Any) -> Labels:
        try:
            return self._check_labels(y)
        except TypeError as error:  # scikit-learn raises it for None, pandas.NA and other objects
            raise DataError(
                "VFL-8501",
                f"y must have a label in every row, and all must be numbers or all text. Found: {error}. "
                "Drop the rows without a label, or add their labels.",
            ) from error

    @abstractmethod
    def _check_labels(self, y: Any) -> Labels:
        """Return y as an array [rows] without missing values."""

    @abstractmethod
    def _encode(self, labels: Labels, train: RowIds) -> tuple[Labels, tuple[str, ...] | None]:
        """Return the labels as the loss takes them, and the class names.

        Args:
            train: the training rows. Scales are fitted on these only.
        """

    def _class_weight(self) -> Any:
        """Return `class_weight` in the form of model.class_weight."""
        return "none" if self.class_weight is None else self.class_weight

    def _tables(self, X: Any, *, fitting: bool = False) -> dict[str, PartyRows]:
        """Return the checked table of each party, in the order of fit."""
        check_in_memory(X)
        if fitting and is_dictionary(X):
            self._adopt(X)
        if not fitting:
            check_form(self._layout, X)
        if is_dictionary(X):
            return self._layout.read(X)
        table = validate_data(
            self,
            X,
            reset=fitting,
            skip_check_array=hasattr(X, "columns"),  # columns of a frame may hold anything
            dtype=DTYPES,
            ensure_all_finite="allow-nan",
        )
        if fitting:
            names = getattr(self, "feature_names_in_", None)
            self._layout = SharedTable.of(self.n_features_in_, names, self.parties, self.clients)
        return self._layout.read(table)

    def _adopt(self, tables: Mapping[str, Any]) -> None:
        """Take the parties and their columns from a dictionary X."""
        if self.parties is not None:
            raise ConfigError(
                "VFL-8502",
                "parties divides one table, but X is a dictionary that already has a table for each party. "
                f"Found both: parties = {self.parties!r}. Leave parties out.",
            )
        self._layout = OwnTables.of(tables)
        self.n_features_in_ = self._layout.features
        self.__dict__.pop("feature_names_in_", None)  # of an earlier fit on one table

    def _split(self, count: int, seed: int) -> Split:
        """Return the rows to train on and, if some are held out, the rows to measure the history on."""
        share = self.validation_fraction
        if share == "auto":
            share = _HELD_OUT if count >= _FEW_ROWS else 0.0
        if not isinstance(share, Real) or not 0 <= share < 1:
            raise ConfigError(
                "VFL-8503",
                f'validation_fraction must be 0 or more and below 1, or "auto". Found {share!r}.',
            )
        held_out = round(count * share)
        if min(count - held_out, held_out if share else count) < 2:
            raise DataError(
                "VFL-8504",
                "fit needs at least two training rows, and two held-out rows if any are held out. Found "
                f"{count - held_out} and {held_out} (n_samples = {count}, validation_fraction = {share}). "
                "Add rows, or set another validation_fraction.",
            )
        if not share:
            return Split(np.arange(count), Parts(count))
        drawn = Split.of(count, DataSettings(test_fraction=float(share)), seed)
        return Split(drawn.order, Parts(count - held_out, held_out))

    def _share_out(
        self,
        tables: Mapping[str, PartyRows],
        numbers: Labels,
        classes: tuple[str, ...] | None,
        split: Split,
    ) -> VerticalData:
        """Fit the encoders, and return the data divided among the parties."""
        form: Form = "codes" if self.embedding == "tabular" else "dense"
        ordered = {party: table[split.order] for party, table in tables.items()}
        self.encoders_ = {
            party: fit_encoder(party, table[: split.parts.train], form, scale=self.scale)
            for party, table in ordered.items()
        }
        parties = [
            Party(party, features, encoder if isinstance(encoder := self.encoders_[party], Encoder) else None)
            for party, features in self._features(ordered).items()
        ]
        labels = torch.from_numpy(numbers[split.order])
        return VerticalData(tuple(parties), labels, split.parts, classes)

    def _features(self, tables: Mapping[str, PartyRows]) -> dict[str, Tensor]:
        """Return each party's features [rows, ...], encoded as in fit."""
        return {party: encode(party, table, self.encoders_[party]) for party, table in tables.items()}

    def _report(self, evaluation: Evaluation) -> None:
        if self.verbose:
            loss = "" if evaluation.train_loss is None else f", training loss {evaluation.train_loss:.4f}"
            figures = as_text(self._in_units(evaluation).metrics)
            print(f"{evaluation.updates} updates, {evaluation.seconds:.1f} simulated s{loss}, {figures}")

    def _in_units(self, evaluation: Evaluation) -> Evaluation:
        """Return the evaluation with errors in the unit of y."""
        return evaluation

    def _keep(self, run: Run) -> None:
        names = list(self._layout.columns)
        self.run_, self.head_, self.models_ = run, run.head, dict(zip(names, run.models, strict=True))
        self._summed = run.config.model.combine == "sum"
        concluded = conclude(run.config, run.task, run.data, run.evaluator.measured)
        self.calibration_ = concluded.decision.calibration
        self.parties_ = self._layout.columns
        self.n_iter_ = run.runtime.updates
        # Not strict: a centralised run has no traffic and no delays.
        self.traffic_ = dict(zip(names, run.runtime.traffic, strict=False))
        self.delays_ = dict(zip(names, run.delays(), strict=False))

    def _outputs(self, X: Any) -> Tensor:
        """Return the head's outputs [rows, outputs]."""
        check_is_fitted(self)
        features = list(self._features(self._tables(X)).values())
        models = list(self.models_.values())
        # In float32, the output of a row changes slightly with the other rows of its batch, and scikit-learn
        # checks that it does not. Float64 hides that. A user's own module may support only float32.
        if ":" not in self.embedding:
            *models, head = (deepcopy(model).double() for model in (*models, self.head_))
            return outputs(models, head, [part.double() for part in features], summed=self._summed)
        return outputs(models, self.head_, features, summed=self._summed)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `run_`: a pickled estimator must not contain the parties' training rows."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "run_"}

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn what X may hold."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _weights(sample_weight: Any, rows: int) -> Doubles | None:
    """Return `sample_weight` as [rows]. A single number applies to all rows."""
    if sample_weight is None:
        return None
    try:
        weights = np.asarray(sample_weight, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError("VFL-8505", f"sample_weight must be numbers. Found: {error}.") from error
    weights = np.full(rows, weights) if weights.ndim == 0 else weights
    if weights.shape != (rows,):
        raise DataError(
            "VFL-8506",
            f"sample_weight must have one number for each of the {rows} rows. Found shape {weights.shape}.",
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
        raise DataError(
            "VFL-8507",
            f"sample_weight must be finite and 0 or more. Found {len(wrong)} weights that are not, such as "
            f"{wrong[0]:g}. Correct them, or drop those rows.",
        )
    return weights
