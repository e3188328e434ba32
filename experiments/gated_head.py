"""Does a gated head ignore a party that sends noise, or that lacks half of the records?

python -m experiments.gated_head [--out DIR] [--quick]. Three parties, two classes. The labels depend on two
parties' features. Held-out log loss of each head on the concatenation of the embeddings, in three cases:

- noise: the third party's features are noise.
- broken: the third party's features are noise for half of the records. A flag says for which.
- absent: the third party lacks half of the records. Its features are zeros there, and a flag says so.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from experiments.jobs import in_groups, run_all
from experiments.results import Verdict, arguments, publish
from vafl.config import from_document
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.models.gated import GatedHead
from vafl.run.assembly import build

CASES, HEADS = ("noise", "broken", "absent"), ("linear", "mlp", "tabular", "gated")
FEATURES, TRAINED, TESTED, UPDATES = 8, 10_000, 4_000, 900
CLOSE = 0.005  # of the log loss
LOWER = 0.75


@dataclass(frozen=True)
class Trial:
    """One head, trained on one drawn data set."""

    case: str
    head: str
    seed: int
    rows: int = TRAINED


def draw(case: str, rows: int, seed: int) -> VerticalData:
    """Draw the features of three parties and the labels."""
    generator, total = torch.Generator().manual_seed(seed), rows + TESTED

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    features = [normal(total, FEATURES) for _ in range(3)]
    weights = normal(3, 2, FEATURES, 1) / FEATURES**0.5
    one, two, three = (
        (2 * own @ linear + 1.5 * torch.tanh(2 * own @ bent))[:, 0]
        for own, (linear, bent) in zip(features, weights, strict=True)
    )
    lacking = torch.rand(total, 1, generator=generator) < 0.5
    if case == "noise":
        features[2], scores = normal(total, 4 * FEATURES), one + two
    else:
        instead = 2 * normal(total, FEATURES) if case == "broken" else torch.zeros(total, FEATURES)
        features[2] = torch.cat([torch.where(lacking, instead, features[2]), lacking.float()], 1)
        scores = one + 1.5 * three
    labels = torch.rand(total, generator=generator) < torch.sigmoid(scores)
    parties = tuple(Party(f"client-{number}", own) for number, own in enumerate(features, 1))
    return VerticalData(parties, labels.long(), Parts(rows, test=TESTED), ("no", "yes"))


def measure(trial: Trial) -> dict[str, float]:
    """Train; return the held-out log loss, and the mean gates of a gated head.

    The gates are those of the parties "1" and "2", and of the third party where its features are real
    ("3 intact") and where they are not ("3 lacking").
    """
    sections = {
        "seed": trial.seed,
        "schedule": {"batch_size": 100},
        "optimiser": {"name": "Adam", "step_size": 0.003},
        "delays": {"kind": "exponential"},
        "stop": {"updates": UPDATES},
        "evaluation": {"every": UPDATES},
        "embedding": {"model": "mlp", "hidden": [16]},
        "model": {
            "width": 8,
            "head": trial.head,
            "head_hidden": [32],
            "combine": "concat",
            "metric": "log_loss",
        },
    }
    run = build(from_document(sections), draw(trial.case, trial.rows, trial.seed))
    found = {"log loss": run.train()[-1].metric or 0.0}
    if isinstance(run.head, GatedHead):
        with torch.no_grad():
            gates = run.head.eval().gates(torch.cat(run.evaluator.embeddings(), 1))
        lacking = run.data.parties[2].features[run.data.test][:, -1] > (
            -torch.inf if trial.case == "noise" else 0
        )
        found |= {"1": gates[:, 0].mean().item(), "2": gates[:, 1].mean().item()}
        found["3 lacking"] = gates[lacking, 2].mean().item()
        if trial.case != "noise":
            found["3 intact"] = gates[~lacking, 2].mean().item()
    return found


def main(options: Sequence[str]) -> int:
    chosen = arguments("gated_head", "Does a gated head ignore a noisy or absent party?").parse_args(options)
    chosen.out.mkdir(parents=True, exist_ok=True)
    seeds = range(1 if chosen.quick else 5)
    trials = [Trial(case, head, seed) for case in CASES for head in HEADS for seed in seeds]
    found = run_all("training", measure, trials, workers=chosen.workers)
    means = [{key: mean(each[key] for each in own) for key in own[0]} for own in in_groups(found, len(seeds))]
    measured = {
        case: dict(zip(HEADS, own, strict=True))
        for case, own in zip(CASES, in_groups(means, len(HEADS)), strict=True)
    }
    return publish(chosen.out, chosen.quick, measured, _verdicts(measured))


def _verdicts(measured: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Verdict]:
    verdicts = []
    for case, by_head in measured.items():
        losses = {head: figures["log loss"] for head, figures in by_head.items()}
        text = ", ".join(f"{head} {loss:.4f}" for head, loss in losses.items())
        gain = min(loss for head, loss in losses.items() if head != "gated") - losses["gated"]
        least = 0.0 if case == "broken" else -CLOSE
        verdicts.append(Verdict(f"{case}: log loss", text, f"gain of at least {least}", gain > least))
        gates = {name: gate for name, gate in by_head["gated"].items() if name != "log loss"}
        text = ", ".join(f"{name} {gate:.2f}" for name, gate in gates.items())
        others = min(gates["1"], gates["2"]) if case == "noise" else gates["3 intact"]
        ignored = gates["3 lacking"] < LOWER * others
        if case != "absent":
            verdicts.append(Verdict(f"{case}: gates", text, f"below {LOWER} of the others", ignored))
    return verdicts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
