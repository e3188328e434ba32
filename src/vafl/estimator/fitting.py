"""What the classifier and the regressor share: their parameters, `fit`, and the way to outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from vafl.data.dataset import Records
from vafl.data.encoding import Encoder, Form
from vafl.data.partition import Party, VerticalData
from vafl.data.settings import DataSettings
from vafl.data.split import Parts, Split
from vafl.errors import ConfigError, DataError
from vafl.estimator.settings import make_config
from vafl.estimator.tables import (
    DTYPES,
    OwnTables,
    Rows,
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

Labels = npt.NDArray[Any]
_FEW_ROWS = 200  # with fewer, none are held out unless the user says so
_HELD_OUT = 0.1


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
        """The defaults are those of `vafl run` on a table: they need no tuning.

        Parameters that are None or 0 follow from the embedding and the number of rows. With another
        embedding than `tabular` they give logistic (or ridge) regression on the sum of the embeddings.

        Args:
            parties: {party: its columns}, each column a name, a pattern such as `pay_*`, or a position;
                columns nobody claims are left out. None shares the columns out evenly. Leave it out
                where X is a dictionary {party: table}: each party then has its own table.
            clients: how many parties share the columns evenly, at most one a column.
            rule: when the server steps: `async` on every upload, `t-sync` once `t` different clients
                have uploaded, `sync` once all have; `centralised` trains on all columns in one place.
            t: how many clients a `t-sync` step waits for.
            delay_bound: no step uses an embedding older than so many updates; 0 means no bound.
            refresh: which rows a client uploads besides its batch: `lookahead` (those the others are
                about to pick), `none` (Algorithm 1 as written), `all`, or `random:R`.
            embedding: each party's model: `tabular`, `linear`, `mlp`, `package.module:Factory`; for arrays
                of sequences or images in a dictionary X, `lstm` or `cnn`.
            width: of an embedding; 0 means as wide as the outputs for a `bias` head, else 32 for `tabular`
                and 16 for others.
            hidden: the embedding's hidden units; () means the default of its kind, (64,) for `mlp`.
            head: the server's model: `tabular`, `bias` (sums the embeddings), `linear` or `mlp`. None is
                `tabular` for a tabular embedding, else `bias`.
            head_hidden: hidden units of a `tabular` or `mlp` head.
            combine: whether the head sees the `sum` of the embeddings or their `concat`enation. None is
                `concat` for a tabular embedding, else `sum`.
            batch_size: rows in a minibatch, at most all of them. 0 is 64 to 1024 for a tabular embedding, by
                the number of rows, else 32.
            epochs: passes over the rows, on average over the clients: a slow one makes fewer. 0 is 40 for a
                tabular embedding, fewer for many rows, else 30.
            optimiser: `sgd` or a class of torch.optim, for every party and the head. None is `AdamW` with
                weight decay for a tabular embedding, else `Adam`. A tabular embedding's steps fall to 0 along
                a cosine, whatever the optimiser.
            step_size: of the optimiser. None is 0.002 for a tabular embedding, else 0.01.
            l2: the coefficient of each party's regulariser l2/2 |theta_m|^2. None is 0 for a tabular
                embedding, else 0.001.
            delays: how long clients sleep in simulated time: `poisson`, `exponential`, `poisson-process`,
                `fixed` or `none`; or a dictionary with the keys of vafl.simulation.delays.DelaySettings,
                such as {"kind": "fixed", "seconds": [1.0, 1.0, 10.0]}.
            scale: whether each party scales its columns, by its own training rows.
            metric: the headline metric of the history, as model.metric of a configuration; `auto` is auc for
                two classes, accuracy for more, and r2 for numbers. The history has every other metric too.
            class_weight: of a classifier: how much the rows of each class count in the training loss.
                `balanced` lets every class count the same in total; a dictionary {class: weight} leaves
                other classes at 1; None weighs all the same. `predict` follows the weighted loss;
                `predict_proba` gives the probabilities that rows have without weights, calibrated on the
                held-out rows if there are any of two classes.
            validation_fraction: share of rows held out of training for the history. The models with the
                lowest loss on them are kept, and a tabular embedding stops when they no longer improve. With
                0 the history is measured on the training rows, and the last models are kept. `auto` is 0.1,
                or 0 if there are fewer than 200 rows.
            random_state: fixes models, batches, delays and held-out rows; None draws a fresh seed.
            verbose: whether to print the history as it is made.
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
        """Train on X, one table or {party: table} with the same rows in the same order, and on y.

        A table is a DataFrame of pandas or polars, or an array. Columns of a DataFrame may hold numbers,
        text, categories, truth values and dates. Gaps are allowed in both.

        Args:
            sample_weight: [rows], how much each row counts in the training loss, 0 or more; None lets all
                count the same. The history is not weighted.

        Raises:
            ValueError: a parameter, or what X and y hold, is wrong: a ConfigError, a DataError, or one of
                scikit-learn's own.
            Diverged: the loss grew out of bounds; a smaller step_size helps.
        """
        labels = self._labels(y)
        tables = self._tables(X, fitting=True)
        check_consistent_length(*(np.empty(len(own)) for own in tables.values()), labels)
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
        best = run.best and run.best.point
        self.best_ = self._in_units(best) if best else None
        self._keep(run)
        return self

    def _labels(self, y: Any) -> Labels:
        try:
            return self._check_labels(y)
        except TypeError as error:  # of whatever is neither number nor text, None and pandas.NA among it
            raise DataError(
                "VFL-8501",
                f"y must hold a number or a text for each row, and all of one kind. Found: {error}. "
                "Leave out the rows that have no label, or give them one.",
            ) from error

    @abstractmethod
    def _check_labels(self, y: Any) -> Labels:
        """y as an array [rows] without gaps."""

    @abstractmethod
    def _encode(self, labels: Labels, train: Records) -> tuple[Labels, tuple[str, ...] | None]:
        """Labels as the loss takes them, and the class names; scales come from the training rows alone."""

    def _class_weight(self) -> Any:
        """`class_weight` as model.class_weight of a configuration has it."""
        return "none" if self.class_weight is None else self.class_weight

    def _tables(self, X: Any, *, fitting: bool = False) -> dict[str, Rows]:
        """The checked table of each party, in the order of fit."""
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
        """Takes the parties from a dictionary, which says itself who holds what."""
        if self.parties is not None:
            raise ConfigError(
                "VFL-8502",
                "parties splits one table, but X is a dictionary with a table for each party already. "
                f"Found both: parties = {self.parties!r}. Leave parties out.",
            )
        self._layout = OwnTables.of(tables)
        self.n_features_in_ = self._layout.features
        self.__dict__.pop("feature_names_in_", None)  # of an earlier fit on one table

    def _split(self, count: int, seed: int) -> Split:
        """The rows to train on, and those to measure the history on, if they are held out."""
        share = self.validation_fraction
        if share == "auto":
            share = _HELD_OUT if count >= _FEW_ROWS else 0.0
        if not isinstance(share, Real) or not 0 <= share < 1:
            raise ConfigError(
                "VFL-8503", f'validation_fraction must be in 0..1, below 1, or "auto". Found {share!r}.'
            )
        held_out = round(count * share)
        if min(count - held_out, held_out if share else count) < 2:
            raise DataError(
                "VFL-8504",
                "at least two rows are needed to train on, and two to measure on. Found "
                f"{count - held_out} and {held_out} (n_samples = {count}, validation_fraction = {share}). "
                "Bring more rows, or set another validation_fraction.",
            )
        if not share:
            return Split(np.arange(count), Parts(count))
        drawn = Split.of(count, DataSettings(test_fraction=float(share)), seed)
        return Split(drawn.order, Parts(count - held_out, held_out))

    def _share_out(
        self,
        tables: Mapping[str, Rows],
        numbers: Labels,
        classes: tuple[str, ...] | None,
        split: Split,
    ) -> VerticalData:
        """The data as the federation holds it."""
        form: Form = "codes" if self.embedding == "tabular" else "dense"
        ordered = {party: own[split.order] for party, own in tables.items()}
        self.encoders_ = {
            party: fit_encoder(party, own[: split.parts.train], form, scale=self.scale)
            for party, own in ordered.items()
        }
        parties = [
            Party(party, own, encoder if isinstance(encoder := self.encoders_[party], Encoder) else None)
            for party, own in self._features(ordered).items()
        ]
        labels = torch.from_numpy(numbers[split.order])
        return VerticalData(tuple(parties), labels, split.parts, classes)

    def _features(self, tables: Mapping[str, Rows]) -> dict[str, Tensor]:
        """[rows, ...] of each party, encoded as in fit."""
        return {party: encode(party, own, self.encoders_[party]) for party, own in tables.items()}

    def _report(self, point: Evaluation) -> None:
        if self.verbose:
            loss = "" if point.train_loss is None else f", training loss {point.train_loss:.4f}"
            figures = as_text(self._in_units(point).metrics)
            print(f"{point.updates} updates, {point.seconds:.1f} simulated s{loss}, {figures}")

    def _in_units(self, point: Evaluation) -> Evaluation:
        """Return the evaluation with errors in the unit of y."""
        return point

    def _keep(self, run: Run) -> None:
        names = list(self._layout.columns)
        self.run_, self.head_, self.models_ = run, run.head, dict(zip(names, run.models, strict=True))
        self._summed = run.config.model.combine == "sum"
        concluded = conclude(run.config, run.task, run.data, run.evaluator.measured)
        self.calibration_ = concluded.decision.calibration
        self.parties_ = self._layout.columns
        self.n_iter_ = run.runtime.updates
        self.traffic_ = dict(zip(names, run.runtime.traffic, strict=False))  # none if centralised
        self.delays_ = dict(zip(names, run.delays(), strict=False))

    def _outputs(self, X: Any) -> Tensor:
        """The head's outputs [rows, outputs]."""
        check_is_fitted(self)
        features = list(self._features(self._tables(X)).values())
        models = list(self.models_.values())
        if ":" not in self.embedding:  # float64, so that a row's output does not depend on the rows beside it
            *models, head = (deepcopy(model).double() for model in (*models, self.head_))
            return outputs(models, head, [own.double() for own in features], summed=self._summed)
        return outputs(models, self.head_, features, summed=self._summed)

    def __getstate__(self) -> dict[str, Any]:
        """Without `run_`: a saved model must not carry the parties' training rows."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "run_"}

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn what X may hold."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _weights(given: Any, rows: int) -> npt.NDArray[np.float64] | None:
    """Return `sample_weight` as [rows]; a single number stands for all rows."""
    if given is None:
        return None
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError("VFL-8505", f"sample_weight must be numbers. Found: {error}.") from error
    weights = np.full(rows, weights) if weights.ndim == 0 else weights
    if weights.shape != (rows,):
        raise DataError(
            "VFL-8506",
            f"sample_weight must be one number for each of the {rows} rows. Found the shape {weights.shape}.",
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
        raise DataError(
            "VFL-8507",
            f"sample_weight must be 0 or more, and finite. Found {len(wrong)} that are not, such as "
            f"{wrong[0]:g}. Correct them, or leave those rows out.",
        )
    return weights
