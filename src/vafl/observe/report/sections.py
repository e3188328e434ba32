"""The sections that every report has: the result, the parties, importance, traffic, privacy, settings."""

from collections.abc import Mapping
from typing import Any

from vafl.names import LOCAL_CLIENT, SERVER
from vafl.observe.record import IMPORTANCE, SCORES
from vafl.observe.report import blocks
from vafl.observe.report.figures import Line, named_values
from vafl.observe.report.inputs import Importance, Influence, Inputs
from vafl.observe.report.markup import Content, Markup, element
from vafl.observe.report.numbers import number_sections
from vafl.observe.report.several_classes import several_class_sections
from vafl.observe.report.statistics import Interval, difference_interval, interval_of
from vafl.observe.report.two_classes import two_class_sections
from vafl.observe.report.words import (
    MEANINGS,
    baseline_name,
    count,
    duration,
    listed,
    megabytes,
    metric_interval,
    metric_name,
    metric_value,
    party_name,
    quoted,
    rounded,
    share,
    signed,
)

ALONE = "label holder alone"  # a baseline
_MOST_COLUMNS = 15
_NO_NETWORK = " The label holder's own columns used no network: its client runs inside the server."
_GUARANTEES = {
    "release_once": "Each party added noise to its records once and released only the result.",
    "frozen": "Every upload was noised; the embeddings were not trained.",
    "dp_train": "Every upload and every local update was noised.",
    "embed_only": (
        "Uploads were noised, but trained models carry records past that noise: this guarantees little."
    ),
}


def target(inputs: Inputs) -> str:
    """Return the name of what the model predicts: the label column, or the data set."""
    data, parties = inputs.settings.get("data", {}), inputs.settings.get("parties", {})
    label = data.get("label") or parties.get(SERVER, {}).get("source", {}).get("label")
    return str(label or inputs.run.summary.get("data", "the label"))


# --- the result ---


def header(inputs: Inputs) -> Markup:
    """Return the title, a sentence about the prediction and its data, and warnings."""
    summary = inputs.run.summary
    rows, silent = summary["rows"], inputs.run.never_uploaded
    # If no party uploaded, the model is untrained. Name all parties then; a warning follows below.
    used = {name: number for name, number in inputs.columns.items() if name not in silent} or inputs.columns
    parties = list(map(party_name, used))
    where = ", whose tables stayed where they are"
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
    summary, found = inputs.run.summary, _absences(inputs)
    if inputs.part == "validation":
        found.append(
            blocks.notice(
                "Measured on validation rows.",
                "The model was selected on the same rows, so its figures are somewhat too good. Hold out "
                "test rows (`data.test_fraction`) for reliable figures.",
            )
        )
    elif inputs.run.watched == "test":
        found.append(
            blocks.notice(
                "Test rows were used during training.",
                "There were no validation rows, so the test rows may have decided when training stopped. Set "
                "`data.validation_fraction` for an independent test.",
                kind="plain",
            )
        )
    if summary["interrupted"]:
        found.append(blocks.notice("Interrupted.", "The run was stopped before its planned end."))
    for party, used in summary["unanswered"].items():
        if party in inputs.run.never_uploaded:
            continue  # `_absences` has a warning about it
        instead = "its last embeddings were used" if used == "last" else "an average was used for its data"
        found.append(
            blocks.notice(f"{party_name(party)} did not answer", f"when the model was measured; {instead}.")
        )
    return found


def _absences(inputs: Inputs) -> list[Markup]:
    """Return warnings about parties that never uploaded or joined late."""
    found, never = [], inputs.run.never_uploaded
    if never:
        found.append(
            blocks.notice(
                f"Never uploaded: {listed(list(map(party_name, never)))}.",
                "These parties belong to the run, but the model has learnt nothing from their data.",
                kind="bad",
            )
        )
    late = [name for name in inputs.run.summary.get("missing_at_start", []) if name not in never]
    if late:
        found.append(
            blocks.notice(
                f"Training began without {listed(list(map(party_name, late)))}.",
                "They connected after `network.join_timeout` and took part from then on.",
            )
        )
    return found


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
    run, said = inputs.run, []
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
        said.append(
            blocks.text(
                element("strong", f"{_difference(metric, abs(gained))} {word}"), f" {against}.{certain}"
            )
        )
    if ALONE not in run.summary["baselines"] and LOCAL_CLIENT not in inputs.columns:
        none = (
            "The label holder has no columns in this run, so there is no model of its data alone to compare "
            "with."
        )
        said.append(blocks.note(none))
    return element("div", said)


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
    low, high = (signed(_difference(metric, end)) for end in ends)
    said = f" The 95% interval of this gain is {low} to {high}; both models were measured on the same rows."
    if ends[0] <= 0 <= ends[1]:
        said += " It includes 0, so the difference may be due to chance."
    return said


def _difference(metric: str, value: float) -> str:
    if metric == "accuracy":
        return f"{100 * value:.1f} percentage points"
    return rounded(value) if metric in ("rmse", "mae") else f"{value:.3f}"


def details(inputs: Inputs) -> list[Markup]:
    """Return the sections about the scores, or a note if the run folder has no scores."""
    held = inputs.scores
    if held is None:
        says = (
            f"Curves, calibration and the confusion matrix are drawn from {SCORES}, which this run folder "
            "does not have. Run again with this version of vafl, or restore the file, and write the report "
            "again with `vafl report`."
        )
        return [blocks.section("Curves and decisions", blocks.note(says))]
    if not held.classes:
        return number_sections(held)
    if len(held.classes) == 2:
        return two_class_sections(held, inputs.run.summary)
    return several_class_sections(held)


# --- the parties ---


def parties(inputs: Inputs) -> Markup:
    """Return the parties, their numbers of columns and their traffic."""
    summary = inputs.run.summary
    rows = summary["rows"]
    sizes = [
        f"{count(number)} {words}"
        for part, words in (
            ("train", "to train the model"),
            ("validation", "to select the model"),
            ("test", "to test it"),
        )
        if (number := rows[part])
    ]
    content: list[Content] = [blocks.text(f"Rows: {listed(sizes)}.")]
    traffic, never = summary["traffic"], inputs.run.never_uploaded
    lines: list[list[Content]] = []
    for name, columns in inputs.columns.items():
        moved = {} if name == LOCAL_CLIENT else traffic.get(name, {})
        lines.append(
            [
                f"{party_name(name)} (never uploaded)" if name in never else party_name(name),
                "not shared" if columns is None else count(columns),
                megabytes(moved["bytes_up"]) if moved else "\N{EN DASH}",
                megabytes(moved["bytes_down"]) if moved else "\N{EN DASH}",
            ]
        )
    if traffic:
        total = [sum(own[way] for own in traffic.values()) for way in ("bytes_up", "bytes_down")]
        lines.append([element("b", "together"), "", *map(megabytes, total)])
    headings = ["Party", "Columns", "Sent", "Received"]
    content.append(blocks.table(headings, lines, "Columns and traffic of each party"))
    took = f"Training took {count(summary['updates'])} updates"
    if summary["rule"] == "centralised":
        took += ", in one place."
    elif summary["simulated"]:
        took += (
            f" and {duration(summary['seconds'])} on the simulator's clock, an estimate for a real network."
        )
    else:
        took += f" and {duration(summary['seconds'])}."
    content.append(blocks.text(took))
    if traffic:
        content.append(
            blocks.note(
                "The parties sent embeddings of their rows and received gradients, never table values."
                + (_NO_NETWORK if LOCAL_CLIENT in inputs.columns else "")
            )
        )
    return blocks.section("Parties and traffic", *content)


def importance(inputs: Inputs) -> Markup:
    """Return the importance of each party and column, or a note if it was not measured."""
    found = inputs.importance
    if found is None or not found.parties:
        says = (
            f"Not measured in this run. The command `vafl importance` asks every party to shuffle its data, "
            f"measures how much worse the model becomes, and writes {IMPORTANCE}; write the report again "
            "afterwards with `vafl report`."
        )
        return blocks.section("What each party adds", blocks.note(says))
    return blocks.section("What each party adds", *_importance(inputs, found))


def _importance(inputs: Inputs, found: Importance) -> list[Content]:
    metric = inputs.run.metric
    ordered = sorted(found.parties.items(), key=lambda own: -own[1].loss)
    drawing = named_values(
        "party-importance",
        "Importance of each party",
        [_influence(party_name(name), own) for name, own in ordered],
        zero=True,
    )
    most, largest = ordered[0]
    says = (
        f"How much the loss rises when a party's data are shuffled among {count(found.rows)} held-out rows; "
        "the line is one standard deviation."
    )
    content: list[Content] = [blocks.figure("By party", drawing, says)]
    columns = [
        (f"{party_name(party)}: {column}", own)
        for party, known in found.columns.items()
        for column, own in known.items()
    ]
    columns.sort(key=lambda own: -own[1].loss)
    if columns:
        shown = [_influence(name, own) for name, own in columns[:_MOST_COLUMNS]]
        drawing = named_values("column-importance", "Importance of the columns", shown, zero=True)
        heading = "By column" if len(columns) <= _MOST_COLUMNS else f"The {_MOST_COLUMNS} strongest columns"
        content.append(blocks.figure(heading, drawing, "The same for one column at a time."))
    else:
        note = "No party allowed the measurement of single columns (`prediction.importance`)."
        content.append(element("div", blocks.note(note)))
    lines = [
        [
            party_name(name),
            "\N{EN DASH}" if own.drop is None else signed(_difference(metric, own.drop)),
            signed(f"{own.loss:.4f}"),
            f"{own.deviation:.4f}",
        ]
        for name, own in ordered
    ]
    lead = f"The model relies most on {quoted(party_name(most))}."
    if largest.drop is not None:
        lead += (
            f" If its data are shuffled, {metric_name(metric)} is "
            f"{_difference(metric, abs(largest.drop))} {'worse' if largest.drop >= 0 else 'better'}."
        )
    headings = ["Party", f"{metric_name(metric)} lost", "Loss added", "Standard deviation"]
    refused = "; ".join(f"{party_name(name)}: {why}" for name, why in found.refused.items())
    return [
        blocks.text(lead),
        blocks.note(f"Not measured: {refused}.") if refused else "",
        blocks.figures(*content),
        blocks.table(headings, lines, "What shuffling each party's data does to the model"),
        blocks.note(
            "If two parties have similar data, each can replace the other. Each then looks less important "
            "than both are together."
        ),
    ]


def _influence(name: str, own: Influence) -> Line:
    spread = Interval(own.loss - own.deviation, own.loss + own.deviation) if own.deviation else None
    return Line(name, own.loss, signed(f"{own.loss:+.4f}"), spread)


# --- privacy ---


def privacy(inputs: Inputs) -> Markup:
    """Return how records and labels were protected, and the privacy budget that was spent."""
    summary = inputs.run.summary
    if summary["rule"] == "centralised":
        return blocks.section(
            "Privacy", blocks.text("All data were in one place, so nothing had to be protected.")
        )
    return blocks.section("Privacy", _labels(summary), *_records(inputs))


def _labels(summary: Mapping[str, Any]) -> Markup:
    epsilon = summary["labels"]["epsilon"]
    if epsilon is None:
        protect = " For classes, `labels.epsilon` protects them." if summary["classes"] else ""
        return blocks.notice(
            "The training labels were not protected.",
            "The gradients that the parties received reveal the label of every training row to each of them."
            + protect,
        )
    kept = share(summary["labels"]["kept_with_probability"])
    return blocks.notice(
        "The training labels were protected.",
        f"Each was kept with a probability of {kept} and replaced at random otherwise (epsilon "
        f"{epsilon:g}), so no party can be sure of any label. Labels of held-out rows are used as they are "
        "and sent to nobody.",
        kind="good",
    )


def _records(inputs: Inputs) -> list[Markup]:
    mode = inputs.run.summary["privacy"]["mode"]
    if mode == "none":
        masked = inputs.run.summary["privacy"]["secure_sum"]
        says = (
            "Uploads were masked: the label holder saw the sum over all parties, and no party's own part of "
            "it. No noise protected single records."
            if masked
            else "The parties' uploads had no noise (`privacy.mode none`). They reveal something about the "
            "records to the label holder."
        )
        return [blocks.text(says)]
    found = [blocks.text(_GUARANTEES[mode])]
    if not inputs.accounts:
        elsewhere = (
            "Each party's ledger says what was spent on every record: `vafl privacy`, on its own machine."
        )
        return [*found, blocks.note(elsewhere)]
    lines = [
        [
            party_name(account["party"]),
            count(account["records"]),
            _amount(account["mu_any_record"]),
            _amount(account["epsilon_any_record"]),
            "none set" if account["mu_max"] is None else f"{account['mu_max']:g}",
        ]
        for account in inputs.accounts
    ]
    delta = inputs.accounts[0]["delta"]
    headings = ["Party", "Records", "mu spent", f"epsilon at delta {delta:g}", "mu allowed"]
    spent = blocks.table(headings, lines, "Privacy spent on any one record")
    simulated = " A simulation sends nothing. The same run over a network would spend this."
    says = "The most that was spent on any one record, over all runs in the ledger. Smaller is more private."
    return [*found, spent, blocks.note(says + (simulated if inputs.run.summary["simulated"] else ""))]


def _amount(value: float) -> str:
    return f"{value:.3g}" if value < float("inf") else "no limit"


# --- how it was made ---


def _embeddings(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the parties' embeddings."""
    parties = settings.get("parties", {}).values()
    own = [entry["embedding"]["model"] for entry in parties if "embedding" in entry]
    return list(dict.fromkeys(own)) or [str(settings.get("embedding", {}).get("model", ""))]


def making(inputs: Inputs) -> Markup:
    """Return the facts about how the run was made, in a collapsed element."""
    run, settings = inputs.run, inputs.settings
    summary, kept = run.summary, run.summary["kept"]
    chosen = f", with the best validation {kept['selected_by']}" if kept["selected_by"] else ""
    facts = {
        "Run": run.name,
        "Ended": f"{inputs.ended:%Y-%m-%d %H:%M} UTC: {summary['ended']}",
        "Data": str(summary.get("data", "")),
        "Rule": str(summary["rule"]),
        "Embedding": ", ".join(_embeddings(settings)),
        "Batch": f"{settings.get('schedule', {}).get('batch_size', '')} rows",
        "Kept model": f"of update {count(kept['updates'])} of {count(summary['updates'])}{chosen}",
        "Seed": str(summary["seed"]),
        "Settings digest": f"{inputs.digest} (SHA-256 of config.toml)",
        "Versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    }
    pairs = ([element("dt", name), element("dd", value)] for name, value in facts.items())
    return element(
        "details",
        element("summary", "How this run was made"),
        element("dl", pairs),
        class_="making",
    )
