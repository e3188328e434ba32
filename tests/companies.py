"""Two companies and a label holder, with partly overlapping files, for tests about tables."""

import numpy as np
import polars as pl

from vafl.config import from_document


def write_companies(folder, people=400, share=0.8, seed=0):
    """Write labels.csv, bank.csv and shop.parquet. The label depends on both companies' columns."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    income, age = generator.normal(size=people), generator.integers(18, 90, people)
    job = generator.choice(["clerk", "cook", "pilot"], people)
    spent, city = generator.normal(size=people), generator.choice(["Aa", "Bb"], people)
    score = 2 * income + (job == "pilot") - 2 * spent + (city == "Bb")
    people_of = {
        "labels": {"repaid": np.where(score > 0.5, "yes", "no")},
        "bank": {"income": income, "age": age, "job": np.where(generator.random(people) < 0.1, "", job)},
        "shop": {"spent": spent, "city": city},
    }
    for name, columns in people_of.items():
        kept = generator.permutation(people)[: people if name == "labels" else round(share * people)]
        ids = [f"P{person:04d}" for person in kept]
        frame = pl.DataFrame({"person": ids, **{key: values[kept] for key, values in columns.items()}})
        if name == "shop":
            frame.write_parquet(folder / "shop.parquet")
        else:
            frame.write_csv(folder / f"{name}.csv")


def add_own_columns(folder, seed=5):
    """Add two columns to the label holder's table: `rating`, which predicts the label, and `branch`."""
    generator = np.random.default_rng(seed)
    labels = pl.read_csv(folder / "labels.csv")
    rating = (labels["repaid"] == "yes").cast(pl.Float64) + pl.Series(generator.normal(size=len(labels)))
    branch = pl.Series(generator.choice(["north", "south"], len(labels)))
    labels.with_columns(rating=rating, branch=branch).write_csv(folder / "labels.csv")


def tables_in(folder):
    """Return party -> the section of its table."""
    tables = {
        "server": {"path": str(folder / "labels.csv"), "id": "person", "label": "repaid"},
        "bank": {"path": str(folder / "bank.csv"), "id": "person"},
        "shop": {"path": str(folder / "shop.parquet"), "id": "person"},
    }
    for name, own in tables.items():
        own["alignment"] = str(folder / f"{name}.alignment.parquet")
    return tables


def document(folder, *parties, tables=None, **sections):
    """Return a configuration document with the tables of these parties; of all if none is given.

    Args:
        tables: party -> the section of its table, in place of the usual one.
    """
    chosen = {name: own for name, own in tables_in(folder).items() if name in parties or not parties}
    whole = {
        "data": {"name": "parties", "parties": ["bank", "shop"]},
        "parties": {name: {"source": own} for name, own in (chosen | (tables or {})).items()},
        "embedding": {"model": "linear"},
        "schedule": {"batch_size": 16},
        "optimiser": {"step_size": 0.2},
        "stop": {"updates": 300},
        "evaluation": {"every": 100},
    }
    for name, values in sections.items():
        whole[name] = {**whole.get(name, {}), **values}
    return whole


def configuration(folder, *parties, **sections):
    """Return the same as a Config."""
    return from_document(document(folder, *parties, **sections))
