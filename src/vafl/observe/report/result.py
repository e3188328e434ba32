"""The top of the report: what the model predicts, warnings, and how good it is."""

from vafl.names import LOCAL_CLIENT, SERVER
from vafl.observe.report import blocks
from vafl.observe.report.figures import Line, named_values
from vafl.observe.report.inputs import Inputs
from vafl.observe.report.markup import Content, Markup, element
from vafl.observe.report.statistics import Interval, difference_interval, interval_of
from vafl.observe.report.words import (
    MEANINGS,
    baseline_name,
    count,
    listed,
    metric_difference,
    metric_interval,
    metric_name,
    metric_value,
    party_name,
    quoted,
    share,
    signed,
)

ALONE = "label holder alone"  # a baseline


def target(inputs: Inputs) -> str:
    """Return the name of what the model predicts: the label column, or the data set."""
    data, parties = inputs.settings.get("data", {}), inputs.settings.get("parties", {})
    label = data.get("label") or parties.get(SERVER, {}).get("source", {}).get("label")
    return str(label or inputs.run.summary.get("data", "the label"))


def header(inputs: Inputs) -> Markup:
    """Return the title, a sentence about the prediction and its data, and warnings."""
    summary = inputs.run.summary
    rows, silent = summary["rows"], inputs.run.never_uploaded
    # If no party uploaded, the model is untrained. Name all parties then; a warning follows below.
    used = {name: number for name, number in inputs.columns.items() if name not in silent} or inputs.columns
    parties = list(map(party_name, used))
    where = ", whose data stayed with them"
    if summary["rule"] == "centralised":
        where = ", pooled in one place"
    elif summary["simulated"]:
        where = ", in a simulation of their federation"
    known = [number for number in used.values() if number is not None]
    columns = f"{count(sum(known))} columns of " if len(known) == len(parties) else "columns of "
    lead = (
        f"The model predicts {quoted(target(inputs))} from {columns}{listed(parties)}"
        f"{where}. It was trained on {count(rows['train'])} rows. "
        f"The figures on this page are from {count(rows[inputs.part])} other rows."
    )
    return element(
        "header",
        element("p", f"Model report, {inputs.ended:%-d %B %Y}", class_="eyebrow"),
        element("h1", f"Predicting {target(inputs)}"),
        element("p", lead, class_="lead"),
        *_warnings(inputs),
    )


def _warnings(inputs: Inputs) -> list[Markup]:
    summary, notices = inputs.run.summary, _absences(inputs)
    if inputs.part == "validation":
        notices.append(
            blocks.notice(
                "Measured on validation rows.",
                "The model was selected on the same rows, so these figures are too optimistic. Hold out "
                "test rows (`data.test_fraction`) for reliable figures.",
            )
        )
    elif inputs.run.watched == "test":
        notices.append(
            blocks.notice(
                "Test rows were used during training.",
                "There were no validation rows, so the test rows may have decided when training stopped. Set "
                "`data.validation_fraction` for an independent test.",
                kind="plain",
            )
        )
    if summary["interrupted"]:
        notices.append(blocks.notice("Interrupted.", "The run was stopped before its planned end."))
    for party, used in summary["unanswered"].items():
        if party in inputs.run.never_uploaded:
            continue  # `_absences` has a warning about it
        instead = "its last embeddings were used" if used == "last" else "an average was used for its data"
        notices.append(
            blocks.notice(f"{party_name(party)} did not answer", f"when the model was measured; {instead}.")
        )
    return notices


def _absences(inputs: Inputs) -> list[Markup]:
    """Return warnings about parties that never uploaded or joined late."""
    notices, never = [], inputs.run.never_uploaded
    if never:
        notices.append(
            blocks.notice(
                f"Never uploaded: {listed(list(map(party_name, never)))}.",
                "These parties belong to the run, but the model has learnt nothing from their data.",
                kind="bad",
            )
        )
    late = [name for name in inputs.run.summary.get("missing_at_start", []) if name not in never]
    if late:
        notices.append(
            blocks.notice(
                f"Training began without {listed(list(map(party_name, late)))}.",
                "They connected after `network.join_timeout` and took part from then on.",
            )
        )
    return notices


def result(inputs: Inputs) -> Markup:
    """Return the headline metric with the baselines, and a table of all metrics."""
    run, part = inputs.run, inputs.part
    metric, kept = run.metric, run.kept(inputs.part)
    intervals = {name: _interval(inputs, name) for name in kept}
    value, interval = kept.get(metric), intervals.get(metric)
    names = list(run.summary["baselines"])
    figures = {name: run.baseline(name, part) for name in names}
    content: list[Content] = [_headline(inputs, metric, value, interval)]
    if value is not None:
        lines = [Line("This model", value, metric_value(metric, value), interval)]
        lines += [
            Line(baseline_name(name), known, metric_value(metric, known), kind="soft")
            for name in names
            if (known := figures[name].get(metric)) is not None
        ]
        title = f"{metric_name(metric)} of this model and of the baselines"
        drawing = named_values("baselines", title, lines, zero=False)
        better = "higher" if run.higher_is_better else "lower"
        says = f"{metric_name(metric)} on the {part} rows; {better} is better. The bar is the 95% interval."
        content.append(
            blocks.figures(
                blocks.figure("Compared with the baselines", drawing, says),
                element("div", _added(inputs, metric, value), class_="beside"),
            )
        )
    headings = ["Metric", "This model, 95% interval", *map(baseline_name, names)]
    ordered = [metric, *(name for name in kept if name != metric)]
    table = [
        [
            [metric_name(name), element("span", MEANINGS.get(name, ""), class_="meaning")],
            [metric_value(name, kept.get(name)), element("small", _between(name, intervals.get(name)))],
            *(metric_value(name, figures[baseline].get(name)) for baseline in names),
        ]
        for name in ordered
    ]
    caption = f"Every metric on the {part} rows"
    return blocks.section("How good the model is", *content, blocks.table(headings, table, caption))


def _between(metric: str, interval: Interval | None) -> str:
    return metric_interval(metric, interval) if interval else "no interval"


def _interval(inputs: Inputs, metric: str) -> Interval | None:
    held = inputs.scores
    if held is None or inputs.run.kept(inputs.part).get(metric) is None:
        return None
    return interval_of(metric, held.scores, held.labels)


def _headline(inputs: Inputs, metric: str, value: float | None, interval: Interval | None) -> Markup:
    between = f"95% interval {metric_interval(metric, interval)}" if interval else ""
    return element(
        "div",
        element(
            "p",
            element("span", metric_name(metric), class_="what"),
            element("span", metric_value(metric, value), class_="big"),
            element("span", between, class_="between"),
            class_="figure",
        ),
        element("p", _in_words(inputs, metric, value), class_="meaning"),
        class_="headline",
    )


def _in_words(inputs: Inputs, metric: str, value: float | None) -> str:
    if value is None:
        return f"The {inputs.part} rows do not define this metric: they have one class or one value only."
    classes = inputs.run.summary["classes"]
    if metric == "auc" and len(classes) == 2:
        return (
            f"Of two random cases, one {quoted(classes[1])} and one {quoted(classes[0])}, the model gives "
            f"the first the higher score {share(value, 0)} of the time. Guessing does so 50% of the time."
        )
    if metric == "accuracy":
        return f"The model is right for {round(1000 * value) / 10:g} of 100 rows."
    if metric == "r2":
        return (
            f"The model explains {share(value, 0)} of the differences between the values. Predicting the "
            "mean for every row explains 0%."
        )
    return f"{metric_name(metric)}: {MEANINGS.get(metric, 'as configured')}."


def _added(inputs: Inputs, metric: str, value: float) -> Markup:
    """Return sentences that compare the model with each baseline."""
    run, sentences = inputs.run, []
    for name in run.summary["baselines"]:
        known = run.baseline(name, inputs.part).get(metric)
        if known is None:
            continue
        gained = (value - known) * (1 if run.higher_is_better else -1)
        word = "better" if gained >= 0 else "worse"
        against = f"than {quoted(baseline_name(name))}"
        if name == "trivial":
            against = (
                "than a model that knows only how often each class occurs"
                if run.summary["classes"]
                else "than predicting the mean for every row"
            )
        elif name == ALONE:
            against = "than the label holder's columns alone: this is what the other parties' data add"
        certain = _certainty(inputs, metric) if name == ALONE else ""
        sentences.append(
            blocks.text(
                element("strong", f"{metric_difference(metric, abs(gained))} {word}"), f" {against}.{certain}"
            )
        )
    if ALONE not in run.summary["baselines"] and LOCAL_CLIENT not in inputs.columns:
        none = (
            "The label holder has no columns in this run, so there is no model of its data alone to compare "
            "with."
        )
        sentences.append(blocks.note(none))
    return element("div", sentences)


def _certainty(inputs: Inputs, metric: str) -> str:
    """Return sentences about the interval of the gain over "label holder alone"; empty if unknown."""
    held = inputs.scores
    if held is None or held.alone is None:
        return ""
    interval = difference_interval(metric, held.scores, held.alone, held.labels)
    if interval is None:
        return ""
    # If lower is better, the gain is the decrease of the metric.
    ends = (interval.low, interval.high) if inputs.run.higher_is_better else (-interval.high, -interval.low)
    low, high = (signed(metric_difference(metric, end)) for end in ends)
    sentences = (
        f" The 95% interval of this gain is {low} to {high}; both models were measured on the same rows."
    )
    if ends[0] <= 0 <= ends[1]:
        sentences += " It includes 0, so the difference may be due to chance."
    return sentences
