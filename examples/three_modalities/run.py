"""Train one model from images, series and a table at three organisations: see README.md."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import tomli_w
from PIL import Image
from sklearn.datasets import load_digits

HERE = Path(__file__).parent
CLIENTS = ("camera", "pen", "census")
EVERYONE = ("server", *CLIENTS)
MNIST_DIGITS = 5000  # enough for the comparison, and few enough for two minutes
OPTIMISER = {"name": "AdamW", "step_size": 0.003, "average": True, "options": {"weight_decay": 0.01}}
NETWORKS = {
    "camera": {"model": "cnn", "hidden": [16, 32]},
    "pen": {"model": "lstm", "hidden": [32]},
    "census": {"model": "tabular"},
}


def digits(data):
    """Return grey images [digits, height, width] in 0..255, and their labels."""
    if data is None:
        bunch = load_digits()
        return (bunch.images / 16 * 255).astype(np.uint8), bunch.target
    from vafl.data.public import read_idx

    images = read_idx(data / "mnist" / "train-images-idx3-ubyte.gz")[:MNIST_DIGITS]
    return images, read_idx(data / "mnist" / "train-labels-idx1-ubyte.gz")[:MNIST_DIGITS]


def write_data(images, labels, folder):
    """Write each party's data in its own order, with digits that some party lacks; return their sources."""
    chance = np.random.default_rng(0)
    ids = np.array([f"D{number:05d}" for number in chance.permutation(len(images))])

    def own_share():
        return chance.permutation(len(images))[: round(0.98 * len(images))]

    top, middle, bottom = np.array_split(images, 3, 1)
    (folder / "camera" / "scans").mkdir()
    for place in own_share():
        Image.fromarray(top[place]).save(folder / "camera" / "scans" / f"{ids[place]}.png")
    lines = middle / 255
    places = np.repeat(own_share(), lines.shape[1])
    steps = np.tile(np.arange(lines.shape[1]), len(places) // lines.shape[1])
    columns = {f"x{column}": lines[places, steps, column] for column in range(lines.shape[2])}
    pl.DataFrame({"id": ids[places], "line": steps, **columns}).write_csv(folder / "pen" / "strokes.csv")
    chosen = own_share()
    statistics = {"id": ids[chosen], **statistics_of(bottom[chosen] / 255)}
    pl.DataFrame(statistics).write_csv(folder / "census" / "statistics.csv")
    chosen = own_share()
    pl.DataFrame({"id": ids[chosen], "digit": labels[chosen]}).write_csv(folder / "server" / "labels.csv")
    return {
        "server": {"path": "labels.csv", "id": "id", "label": "digit"},
        "camera": {"kind": "images", "path": "scans"},
        "pen": {"kind": "series", "path": "strokes.csv", "id": "id", "time": "line"},
        "census": {"path": "statistics.csv", "id": "id"},
    }


def statistics_of(part):
    """Return statistics of a part of each digit: the ink in bands and columns, its centre and its spread."""
    ink = {f"band_{place}": band.sum((1, 2)) for place, band in enumerate(np.array_split(part, 2, 1))}
    ink |= {f"column_{place}": column.sum((1, 2)) for place, column in enumerate(np.array_split(part, 8, 2))}
    columns, whole = np.arange(part.shape[2]), part.sum((1, 2)) + 1e-6
    centre = (part.sum(1) * columns).sum(1) / whole
    spread = np.sqrt((part.sum(1) * (columns - centre[:, None]) ** 2).sum(1) / whole)
    return ink | {"centre": centre, "spread": spread, "dark": (part > 0.5).sum((1, 2))}


def write_configurations(sources, folder, address):
    """Write federation.toml and party.toml into each party's folder."""
    for party in EVERYONE:
        shutil.copy(HERE / "federation.toml", folder / party)
        own = {"party": party, "federation": "federation.toml", "source": sources[party]}
        own |= {"optimiser": OPTIMISER, "network": {"address": address, "certificates": "certs"}}
        if party in NETWORKS:
            own["embedding"] = NETWORKS[party]
        (folder / party / "party.toml").write_text(tomli_w.dumps(own))
    words = [word for party in EVERYONE for word in ("--party", party)]
    vafl("certs", str(folder / "certs"), *words)
    for party in EVERYONE:
        shutil.copytree(folder / "certs" / party, folder / party / "certs")


def vafl(*words, folder=None):
    """Run one command, and show its output if it fails."""
    command = [sys.executable, "-m", "vafl.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vafl {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def together(folder, commands):
    """Run a command at every party at the same time, each in the party's folder."""
    processes = {}
    for party, words in commands.items():
        log = (folder / party / "log.txt").open("a")
        command = [sys.executable, "-m", "vafl.cli", *words]
        processes[party] = subprocess.Popen(command, cwd=folder / party, stdout=log, stderr=log)
    failed = [party for party, process in processes.items() if process.wait()]
    if failed:
        raise SystemExit(f"{failed} failed:\n{(folder / failed[0] / 'log.txt').read_text()}")


def accuracy(run):
    """Return the accuracy of the kept models on the held-out digits."""
    return json.loads((run / "summary.json").read_text())["kept"]["test"]["accuracy"]


def in_one_place(sources, folder, clients, *settings):
    """Train some parties in this place with one file for all, and return the accuracy."""
    document = tomllib.loads((HERE / "federation.toml").read_text())
    document["data"]["parties"] = list(clients)
    widths = document["model"]["width"]
    document["model"]["width"] = {party: widths[party] for party in clients}
    document["optimiser"] |= OPTIMISER
    document["parties"] = {
        party: {"source": {**sources[party], **absolute(folder / party, sources[party], party)}}
        for party in ("server", *clients)
    }
    for party in clients:
        document["parties"][party]["embedding"] = NETWORKS[party]
    name = "-".join([*clients, *settings]).replace("=", "-")
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(document))
    changes = [word for setting in settings for word in ("--set", setting)]
    vafl("run", str(path), "--out", str(folder / name), *changes)
    return accuracy(folder / name)


def absolute(folder, source, party):
    """Return the paths of a party's source as seen from another folder."""
    return {"path": str(folder / source["path"]), "alignment": str(folder / f"{party}.alignment.parquet")}


def main():
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of public data sets; without it, small digits")
    parser.add_argument("--out", type=Path, help="keep the parties' folders here")
    parser.add_argument("--address", default="127.0.0.1:7470")
    options = parser.parse_args()
    folder, began = options.out or Path(tempfile.mkdtemp(prefix="three-modalities-")), time.monotonic()
    for party in EVERYONE:
        (folder / party).mkdir(parents=True)
    sources = write_data(*digits(options.data), folder)
    write_configurations(sources, folder, options.address)
    for party in EVERYONE:
        vafl("check", "party.toml", folder=folder / party)
    print(f"aligning {len(EVERYONE)} parties")
    together(folder, dict.fromkeys(EVERYONE, ("align", "party.toml")))
    print("training as four processes")
    commands = dict.fromkeys(CLIENTS, ("client", "party.toml", "--out", "run"))
    together(folder, {"server": ("server", "party.toml", "--out", "run"), **commands})
    figures = {"federated, all three": accuracy(folder / "server" / "run")}
    print("training for comparison")
    for pair in combinations(CLIENTS, 2):
        figures[" and ".join(pair)] = in_one_place(sources, folder, pair)
    figures["in one place, all three"] = in_one_place(sources, folder, CLIENTS, "rule.name=centralised")
    for name, figure in figures.items():
        print(f"{name:24} {figure:.3f}")
    print(f"{time.monotonic() - began:.0f} seconds; the parties' folders are in {folder}")


if __name__ == "__main__":
    main()
