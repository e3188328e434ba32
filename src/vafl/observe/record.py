"""The run folder: what a run leaves behind, and how it is read back.

DIR/config.toml      the resolved configuration
DIR/history.jsonl    one object per evaluation
DIR/status.json      how it stands, or stood last; written all the time
DIR/summary.json     the result; a folder without it holds a run that did not end
DIR/scores.parquet   the labels and scores of the held-out rows, for the label holder alone
DIR/report.html      the result as a page for people
DIR/models/PARTY/    its trained model; the head is the server's
DIR/*.png, *.svg     plots

Folders in it hold what is derived from records: only their owner can read them, or the files in them. The
same holds for the scores and the report. The other files at the top are figures about the run, and are
readable as the umask allows.
"""

import io
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vafl.errors import RunFolderError
from vafl.files import drafted, make_private_folder, write_atomically
from vafl.folders import LOCK, HeldFolder
from vafl.kernels import NATIVE
from vafl.models.metrics import LOWER_IS_BETTER
from vafl.observe.evaluation import Evaluation
from vafl.observe.status import STATUS

if TYPE_CHECKING:
    import polars as pl

LEDGERS = "privacy"  # of clients that really uploaded: never removed
SIMULATED_LEDGERS = "privacy-simulated"
SUMMARY, HISTORY, REPORT = "summary.json", "history.jsonl", "report.html"
SCORES, IMPORTANCE = "scores.parquet", "importance.json"
ALIGNMENTS = "alignments"  # of tables that are all on this machine
_NAME = "[^/]+"
_WRITTEN = re.compile(  # every file that a run leaves, those of crashes included
    rf"""{re.escape(LOCK)} | config\.toml | {re.escape(HISTORY)} | {re.escape(SUMMARY)} | {re.escape(STATUS)}
    | {re.escape(REPORT)} | {re.escape(SCORES)} | {re.escape(IMPORTANCE)}
    | (progress|privacy-spent|importance)\.(png|svg)
    | models/{_NAME}/(model\.safetensors|manifest\.toml)
    | logs/{_NAME}\.log
    | state/server\.marks
    | state/{_NAME}/({re.escape(LOCK)}|labels\.safetensors|table\.records)
    | state/{_NAME}/((best|evaluated)/)?checkpoint\.safetensors
    | certs/({_NAME}/)?{_NAME}\.(key|pem)(\.[0-9a-f]{{16}})?
    | {SIMULATED_LEDGERS}/{_NAME}\.ledger(\.head)?
    | {ALIGNMENTS}/{_NAME}\.alignment\.parquet""",
    re.VERBOSE,
)
_NEEDED = ("metric", "watched", "kept", "baselines")  # of a summary
_FOLDERS = ("models", "state", "certs", "logs", SIMULATED_LEDGERS, ALIGNMENTS)


class RunFolder:
    """Writes one run's folder. Nothing of another run is ever mixed in or lost by accident.

    Use as a context manager: inside, no other process may write the folder. Of a run that is to be resumed
    nothing is changed before `begin`, so that whatever speaks against it can be found first.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path, self._history = path, path / HISTORY
        replaced = [] if resume else self._to_replace(overwrite)
        self._held = HeldFolder(path)
        try:
            self._remove(replaced)
        except BaseException:
            self._held.close()
            raise

    def begin(self, config_toml: str) -> None:
        """The run begins or goes on: it has this configuration, and has not ended."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        (self.path / SCORES).unlink(missing_ok=True)
        make_private_folder(self.path / "models")
        write_atomically(self.path / "config.toml", config_toml.encode())
        self._history.touch()

    def rewind(self, seconds: float) -> list[Evaluation]:
        """Goes back to where the run stood after so many seconds; gives the evaluations made until then.

        Those after it were undone by a crash, which may also have cut the last line short.

        Raises:
            RunFolderError: a line is damaged.
        """
        points, length = list[Evaluation](), 0
        for line in self._history.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or (point := self._read_point(line, len(points))).seconds > seconds:
                break
            points.append(point)
            length += len(line)
        os.truncate(self._history, length)
        return points

    def _read_point(self, line: bytes, before: int) -> Evaluation:
        try:
            return Evaluation(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise RunFolderError(
                "VFL-8021",
                f'--resume needs the evaluations so far. Line {before + 1} of "{self._history}" is damaged: '
                f"{error}. Remove it and those below it, and resume again: only they are lost.",
            ) from error

    def _to_replace(self, overwrite: bool) -> list[str]:
        """What must go to make room for the run, if the user asked for that; only ever our own files."""
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise RunFolderError("VFL-8022", f'the run folder must be a folder. "{self.path}" is a file.')
        present = [entry.name for entry in self.path.iterdir() if entry.name != LOCK]
        if not present:
            return []
        if not overwrite:
            raise RunFolderError(
                "VFL-8023",
                f'the run folder must be new or empty. "{self.path}" holds {len(present)} entries. '
                "Name another --out, or add --overwrite to replace that run.",
            )
        if LEDGERS in present:
            raise RunFolderError(
                "VFL-8024",
                f'"{self.path}" holds privacy ledgers: what they count has left this machine, and no new run '
                "may forget it. Name another --out, and in privacy.ledger the folder to go on with.",
            )
        if foreign := list(islice(self._foreign(), 3)):
            raise RunFolderError(
                "VFL-8025",
                f'--overwrite replaces run folders only. "{self.path}" holds {", ".join(foreign)}, '
                "which no run wrote. Name another --out.",
            )
        if not self._is_run():
            raise RunFolderError(
                "VFL-8026",
                f'--overwrite replaces run folders only. "{self.path}" holds names that runs use too, but '
                f"neither a run's {LOCK} nor its history of evaluations. Name another --out.",
            )
        return present

    def _foreign(self) -> Iterator[str]:
        """What is there, at any depth, that no run writes."""
        for entry in self.path.rglob("*"):
            place = entry.relative_to(self.path)
            if entry.is_dir() and not entry.is_symlink():
                ours = place.parts[0] in _FOLDERS
            else:
                ours = bool(_WRITTEN.fullmatch(place.with_name(drafted(place.name)).as_posix()))
            if not ours:
                yield str(place)

    def _is_run(self) -> bool:
        """Others too have a config.toml and logs; a run has locked its folder, or recorded evaluations."""
        if any(self.path.glob(LOCK)) or any(self.path.glob(f"state/*/{LOCK}")):
            return True
        try:
            return bool(_read_points(self.path))
        except (OSError, ValueError, TypeError):
            return False

    def _remove(self, names: Sequence[str]) -> None:
        for state in self.path.glob("state/*/") if "state" in names else ():
            HeldFolder(state).close()  # a client that is still at work there is left alone
        for name in names:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        self._held.close()

    def append(self, point: Evaluation) -> None:
        """Adds one evaluation; it is in the file when this returns, should the process die."""
        with self._history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point), allow_nan=False) + "\n")

    def keep_scores(self, scores: "pl.DataFrame") -> None:
        """Write the labels and scores of the held-out rows, which only the owner of the file can read."""
        content = io.BytesIO()
        scores.write_parquet(content)
        write_atomically(self.path / SCORES, content.getvalue(), private=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary, whole or not at all."""
        write_atomically(self.path / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())


def _read_points(path: Path) -> list[Evaluation]:
    lines = (path / HISTORY).read_text(encoding="utf-8").splitlines()
    return [Evaluation(**json.loads(line)) for line in lines]


def versions() -> dict[str, str]:
    """The versions that made a result."""
    packages = {name: version(name) for name in ("vafl", "torch", "numpy")}
    return {"python": platform.python_version(), **packages, "kernels": "native" if NATIVE else "portable"}


@dataclass(frozen=True)
class RecordedRun:
    """A run folder, read back."""

    name: str
    path: Path
    summary: Mapping[str, Any]
    points: Sequence[Evaluation]

    @property
    def metric(self) -> str:
        """The name of its headline metric."""
        return str(self.summary["metric"]["name"])

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in LOWER_IS_BETTER

    @property
    def watched(self) -> str:
        """Which rows its evaluations use, "validation" or "test"."""
        return str(self.summary["watched"])

    @property
    def measured(self) -> list[tuple[Evaluation, float]]:
        """Its evaluations that have the headline metric, and their values."""
        return [(point, point.metric) for point in self.points if point.metric is not None]

    def kept(self, rows: str) -> Mapping[str, float | None]:
        """Return every metric of the models kept on "validation" or "test" rows; empty if not known."""
        return self.summary["kept"][rows] or {}

    def baseline(self, name: str, rows: str) -> Mapping[str, float | None]:
        """Return every metric of a baseline on "validation" or "test" rows; empty if not known."""
        found: Mapping[str, float | None] = self.summary["baselines"].get(name, {}).get(rows, {})
        return found

    @property
    def validation(self) -> float | None:
        """The headline metric of the models kept on the validation rows; None if it is not known."""
        return self.kept("validation").get(self.metric)

    @property
    def test(self) -> float | None:
        """The headline metric of the models kept on the test rows; None if it is not known."""
        return self.kept("test").get(self.metric)

    @property
    def never_uploaded(self) -> list[str]:
        """The parties that uploaded nothing, so that nothing was learnt from their data."""
        return [name for name, count in self.summary.get("activations", {}).items() if not count]

    def by(self, metric: str) -> "RecordedRun":
        """Return the run with another of its metrics as the headline."""
        points = [replace(point, metric=point.metrics.get(metric)) for point in self.points]
        value = self.kept(self.watched).get(metric)
        return replace(
            self, points=points, summary={**self.summary, "metric": {"name": metric, "value": value}}
        )

    def first_reaching(self, target: float) -> Evaluation | None:
        """Return the first evaluation as good as `target`; None if there is none."""
        sign = 1 if self.higher_is_better else -1
        return next((point for point, value in self.measured if sign * (value - target) >= 0), None)


def read_run(path: Path) -> RecordedRun:
    """Reads a finished run's folder.

    Raises:
        RunFolderError: it is missing, damaged, or the run did not end.
    """
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        points = _read_points(path)
        if not points:
            raise ValueError("it has no evaluation")
        if missing := [name for name in _NEEDED if name not in summary]:
            raise ValueError(f"{SUMMARY} has no {', '.join(missing)}")
    except FileNotFoundError as error:
        raise RunFolderError(
            "VFL-8027",
            f'"{path}" must be the folder of a finished run. Found no {Path(error.filename).name} there.',
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(
            "VFL-8028", f'"{path}" must be the folder of a finished run. It is damaged: {error}.'
        ) from error
    run = RecordedRun(path.resolve().name, path, summary, points)
    # A run that was resumed with another model.metric has recorded two headlines; all metrics are there.
    return run.by(run.metric)
