"""Format numbers, metrics and names for readers without a technical background."""

from vafl.names import LOCAL_CLIENT
from vafl.observe.report.figures import plain
from vafl.observe.report.statistics import Interval

_DASH = "\N{EN DASH}"
NAMES = {
    "auc": "AUC",
    "log_loss": "Log loss",
    "accuracy": "Accuracy",
    "average_precision": "Average precision",
    "brier": "Brier score",
    "f1": "F1 (at 0.5)",
    "macro_f1": "Macro F1",
    "r2": "R\N{SUPERSCRIPT TWO}",
    "rmse": "RMSE",
    "mae": "Mean absolute error",
}
MEANINGS = {
    "auc": "how often a random positive case scores higher than a random negative one; 0.5 is guessing",
    "log_loss": "penalty for improbable outcomes, averaged over the rows; lower is better",
    "accuracy": "share of rows whose most probable class is right",
    "average_precision": "precision averaged over all recalls; guessing reaches the share of positives",
    "brier": "mean squared error of the probabilities; lower is better",
    "f1": "balance of precision and recall at probability 0.5",
    "macro_f1": "balance of precision and recall, averaged over the classes",
    "r2": "share of the differences between the values that the model explains; 0 is predicting the mean",
    "rmse": "typical error, in which large errors count more; in the label's unit",
    "mae": "average size of the error; in the label's unit",
}
BASELINES = {
    "trivial": "Trivial baseline",
    "label holder alone": "Label holder alone",
}


def metric_name(metric: str) -> str:
    """Return the displayed name of a metric."""
    return NAMES.get(metric, metric.replace("_", " "))


def baseline_name(name: str) -> str:
    """Return the displayed name of a baseline."""
    return BASELINES.get(name, name.replace("_", " ").capitalize())


def party_name(name: str) -> str:
    """Return the displayed name of a party."""
    return "label holder" if name == LOCAL_CLIENT else name


def metric_value(metric: str, value: float | None) -> str:
    """Return a metric's value as text; a dash if it is not defined."""
    if value is None:
        return _DASH
    if metric == "accuracy":
        return share(value)
    return rounded(value) if metric in ("rmse", "mae") else signed(f"{value:.3f}")


def metric_difference(metric: str, value: float) -> str:
    """Return the difference of two values of a metric as text."""
    if metric == "accuracy":
        return f"{100 * value:.1f} percentage points"
    return rounded(value) if metric in ("rmse", "mae") else f"{value:.3f}"


def metric_interval(metric: str, interval: Interval | None) -> str:
    """Return an interval as text, such as 0.851 to 0.872; a dash if there is none."""
    if interval is None:
        return _DASH
    return f"{metric_value(metric, interval.low)} to {metric_value(metric, interval.high)}"


def rounded(value: float, digits: int = 3) -> str:
    """Return a number rounded to `digits` significant digits."""
    return plain(float(f"{value:.{digits}g}"))


def signed(text: str) -> str:
    """Return a number's text with a minus sign instead of a hyphen, and without a sign if it is zero."""
    if not text.strip("-0."):
        return text.removeprefix("-")
    return text.replace("-", "\N{MINUS SIGN}")


def share(value: float, decimals: int = 1) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.{decimals}f}%"


def count(number: float) -> str:
    """Return a whole number with separators between thousands."""
    return f"{number:,.0f}"


def megabytes(size: float) -> str:
    """Return a number of bytes with a suitable unit."""
    for least, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= least:
            return f"{size / least:,.3g} {unit}" if size < 1000 * least else f"{size / least:,.0f} {unit}"
    return f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a duration with a suitable unit."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def listed(names: list[str]) -> str:
    """Return names as a list in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def quoted(name: str) -> str:
    """Return a name in quotation marks."""
    return f"\N{LEFT DOUBLE QUOTATION MARK}{name}\N{RIGHT DOUBLE QUOTATION MARK}"
