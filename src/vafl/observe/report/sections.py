"""The sections after the result: details, the parties and their importance, privacy, how it was made."""

from collections.abc import Mapping
from typing import Any

from vafl.names import LOCAL_CLIENT
from vafl.observe.record import IMPORTANCE, SCORES
from vafl.observe.report import blocks
from vafl.observe.report.figures import Line, named_values
from vafl.observe.report.inputs import Importance, Influence, Inputs
from vafl.observe.report.markup import Content, Markup, element
from vafl.observe.report.numbers import number_sections
from vafl.observe.report.several_classes import several_class_sections
from vafl.observe.report.statistics import Interval
from vafl.observe.report.two_classes import two_class_sections
from vafl.observe.report.words import (
    count,
    duration,
    listed,
    megabytes,
    metric_difference,
    metric_name,
    party_name,
    quoted,
    share,
    signed,
)

_MOST_COLUMNS = 15
_NO_NETWORK = " The label holder's own columns used no network: its client runs inside the server."
_GUARANTEES = {
    "release_once": "Each party added noise to its records once and released only the result.",
    "frozen": "Every upload was noised; the embeddings were not trained.",
    "dp_train": "Every upload and every local update was noised.",
    "embed_only": (
        "Every upload was noised, but the trained models carry records past that noise, so the guarantee is "
        "weak."
    ),
}


def details(inputs: Inputs) -> list[Markup]:
    """Return the sections about the scores, or a note if the run folder has no held."""
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
        total = [sum(moved[way] for moved in traffic.values()) for way in ("bytes_up", "bytes_down")]
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
                "The parties sent embeddings of their rows and received gradients. Their data stayed with "
                "them." + (_NO_NETWORK if LOCAL_CLIENT in inputs.columns else "")
            )
        )
    return blocks.section("Parties and traffic", *content)


def importance(inputs: Inputs) -> Markup:
    """Return the importance of each party and column, or a note if it was not measured."""
    measured = inputs.importance
    if measured is None or not measured.parties:
        says = (
            "Not measured in this run. The command `vafl importance` asks every party to shuffle its data, "
            f"measures how much worse the model becomes, and writes {IMPORTANCE}. Write the report again "
            "afterwards, with `vafl report`."
        )
        return blocks.section("What each party adds", blocks.note(says))
    return blocks.section("What each party adds", *_importance(inputs, measured))


def _importance(inputs: Inputs, measured: Importance) -> list[Content]:
    metric = inputs.run.metric
    ordered = sorted(measured.parties.items(), key=lambda entry: -entry[1].loss)
    drawing = named_values(
        "party-importance",
        "Importance of each party",
        [_influence(party_name(name), influence) for name, influence in ordered],
        zero=True,
    )
    most, largest = ordered[0]
    says = (
        f"How much the loss rises when a party's data are shuffled among {count(measured.rows)} held-out "
        "rows; the line is one standard deviation."
    )
    content: list[Content] = [blocks.figure("By party", drawing, says)]
    columns = [
        (f"{party_name(party)}: {column}", influence)
        for party, influences in measured.columns.items()
        for column, influence in influences.items()
    ]
    columns.sort(key=lambda entry: -entry[1].loss)
    if columns:
        shown = [_influence(name, influence) for name, influence in columns[:_MOST_COLUMNS]]
        drawing = named_values("column-importance", "Importance of the columns", shown, zero=True)
        heading = "By column" if len(columns) <= _MOST_COLUMNS else f"The {_MOST_COLUMNS} strongest columns"
        content.append(blocks.figure(heading, drawing, "The same for one column at a time."))
    else:
        note = "No party allowed the measurement of single columns (`prediction.importance`)."
        content.append(element("div", blocks.note(note)))
    lines = [
        [
            party_name(name),
            "\N{EN DASH}" if influence.drop is None else signed(metric_difference(metric, influence.drop)),
            signed(f"{influence.loss:.4f}"),
            f"{influence.deviation:.4f}",
        ]
        for name, influence in ordered
    ]
    lead = f"The model relies most on {quoted(party_name(most))}."
    if largest.drop is not None:
        lead += (
            f" If its data are shuffled, {metric_name(metric)} is "
            f"{metric_difference(metric, abs(largest.drop))} {'worse' if largest.drop >= 0 else 'better'}."
        )
    headings = ["Party", f"{metric_name(metric)} lost", "Loss added", "Standard deviation"]
    refused = "; ".join(f"{party_name(name)}: {why}" for name, why in measured.refused.items())
    return [
        blocks.text(lead),
        blocks.note(f"Not measured: {refused}.") if refused else "",
        blocks.figures(*content),
        blocks.table(headings, lines, "What shuffling each party's data does to the model"),
        blocks.note(
            "If two parties have similar data, each can replace the other. Each then looks less important "
            "alone than both together."
        ),
    ]


def _influence(name: str, measured: Influence) -> Line:
    loss, deviation = measured.loss, measured.deviation
    spread = Interval(loss - deviation, loss + deviation) if deviation else None
    return Line(name, loss, signed(f"{loss:+.4f}"), spread)


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
        f"{epsilon:g}), so no party can be sure of any label. The labels of held-out rows are used "
        "unchanged, and they stay with the label holder.",
        kind="good",
    )


def _records(inputs: Inputs) -> list[Markup]:
    mode = inputs.run.summary["privacy"]["mode"]
    if mode == "none":
        masked = inputs.run.summary["privacy"]["secure_sum"]
        says = (
            "Uploads were masked: the label holder saw only the sum over all parties, not the part of any "
            "one party. No noise protected single records."
            if masked
            else "The parties' uploads had no noise (`privacy.mode none`). They reveal something about the "
            "records to the label holder."
        )
        return [blocks.text(says)]
    sections = [blocks.text(_GUARANTEES[mode])]
    if not inputs.accounts:
        elsewhere = (
            "Each party's ledger has what was spent on every record. `vafl privacy` shows it, on the machine "
            "of that party."
        )
        return [*sections, blocks.note(elsewhere)]
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
    return [*sections, spent, blocks.note(says + (simulated if inputs.run.summary["simulated"] else ""))]


def _amount(value: float) -> str:
    return f"{value:.3g}" if value < float("inf") else "no limit"


# --- how it was made ---


def _embeddings(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the parties' embeddings."""
    parties = settings.get("parties", {}).values()
    models = [entry["embedding"]["model"] for entry in parties if "embedding" in entry]
    return list(dict.fromkeys(models)) or [str(settings.get("embedding", {}).get("model", ""))]


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
