"""The run folder: write the files of a run, and read them back.

DIR/config.toml      the resolved configuration
DIR/history.jsonl    one object per evaluation
DIR/status.json      the current or last status, rewritten twice a second
DIR/summary.json     the result; a folder without it holds a run that has not finished
DIR/scores.parquet   the labels and scores of the held-out rows, only at the label holder
DIR/report.html      the result as a page
DIR/models/PARTY/    a party's trained model; the head is the server's model
DIR/*.png, *.svg     plots

Subfolders hold data derived from records, so only their owner can read them. The same holds for
scores.parquet and report.html. The other files at the top level hold figures about the run and follow the
umask.
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

LEDGERS = "privacy"  # ledgers of clients that sent real uploads; never removed
SIMULATED_LEDGERS = "privacy-simulated"
SUMMARY, HISTORY, REPORT = "summary.json", "history.jsonl", "report.html"
SCORES, IMPORTANCE = "scores.parquet", "importance.json"
ALIGNMENTS = "alignments"  # alignment files, if all tables are on this machine
_NAME = "[^/]+"
_WRITTEN = re.compile(  # every file that a run may leave, including files left by crashes
    rf"""{re.escape(LOCK)} | config\.toml | {re.escape(HISTORY)} | {re.escape(SUMMARY)} | {re.escape(STATUS)}
    | {re.escape(REPORT)} | {re.escape(SCORES)} | {re.escape(IMPORTANCE)}
    | (progress|privacy-spent|importance)\.(png|svg)
    | models/{_NAME}/(model\.safetensors|manifest\.toml)
    | logs/{_NAME}\.log
    | state/server\.marks
    | state/{_NAME}/({re.escape(LOCK)}|labels\.safetensors|table\.records|encoder\.json)
    | state/{_NAME}/((best|evaluated)/)?checkpoint\.safetensors
    | certs/({_NAME}/)?{_NAME}\.(key|pem)(\.[0-9a-f]{{16}})?
    | {SIMULATED_LEDGERS}/{_NAME}\.ledger(\.head)?
    | {ALIGNMENTS}/{_NAME}\.alignment\.parquet""",
    re.VERBOSE,
)
_NEEDED = ("metric", "watched", "kept", "baselines")  # required entries of summary.json
_FOLDERS = ("models", "state", "certs", "logs", SIMULATED_LEDGERS, ALIGNMENTS)


class RunFolder:
    """Writes the folder of one run. It never mixes two runs, and never removes files that no run wrote.

    Use it as a context manager. Inside the block, no other process can write the folder. The files of a
    resumed run stay unchanged until `begin`, so that callers can check the run before that.

    Args:
        overwrite: replace a run that is in the folder.
        resume: continue the run in the folder.

    Raises:
        RunFolderError: the folder is not empty and may not be replaced, or another process uses it.
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
        """Mark the run as started and unfinished, and write its configuration."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        (self.path / SCORES).unlink(missing_ok=True)
        make_private_folder(self.path / "models")
        write_atomically(self.path / "config.toml", config_toml.encode())
        self._history.touch()

    def rewind(self, seconds: float) -> list[Evaluation]:
        """Remove the evaluations after the last checkpoint from the history, and return the others.

        A crash discards everything after the checkpoint. It may also have left an incomplete last line.

        Args:
            seconds: the run's clock at the checkpoint.

        Raises:
            RunFolderError: a line is damaged.
        """
        evaluations, length = list[Evaluation](), 0
        for line in self._history.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            evaluation = self._read_evaluation(line, len(evaluations))
            if evaluation.seconds > seconds:
                break
            evaluations.append(evaluation)
            length += len(line)
        os.truncate(self._history, length)
        return evaluations

    def _read_evaluation(self, line: bytes, before: int) -> Evaluation:
        try:
            return Evaluation(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise RunFolderError(
                "VFL-8021",
                f'--resume needs the history of evaluations. Line {before + 1} of "{self._history}" is '
                f"damaged: {error}. Remove this line and all lines below it, then resume again.",
            ) from error

    def _to_replace(self, overwrite: bool) -> list[str]:
        """Return the names of the entries that the new run replaces; empty for a new folder.

        Raises:
            RunFolderError: the folder has entries and `overwrite` is not set, or has files that no run wrote.
        """
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise RunFolderError(
                "VFL-8022", f'the run folder must be a folder. "{self.path}" is a file. Choose another --out.'
            )
        present = [entry.name for entry in self.path.iterdir() if entry.name != LOCK]
        if not present:
            return []
        if not overwrite:
            raise RunFolderError(
                "VFL-8023",
                f'the run folder must be new or empty. "{self.path}" holds {len(present)} entries. '
                "Choose another --out, or add --overwrite to replace that run.",
            )
        if LEDGERS in present:
            raise RunFolderError(
                "VFL-8024",
                f'--overwrite never removes privacy ledgers. Found some in "{self.path}": they count uploads '
                "that have left this machine. Choose another --out, and set privacy.ledger to the folder of "
                "these ledgers to continue them.",
            )
        if foreign := list(islice(self._foreign(), 3)):
            raise RunFolderError(
                "VFL-8025",
                f'--overwrite replaces run folders only. "{self.path}" holds {", ".join(foreign)}, '
                "which no run wrote. Choose another --out.",
            )
        if not self._is_run():
            raise RunFolderError(
                "VFL-8026",
                f'--overwrite replaces run folders only. "{self.path}" has file names that runs use, but '
                f"neither {LOCK} nor a history of evaluations. Choose another --out.",
            )
        return present

    def _foreign(self) -> Iterator[str]:
        """Yield the paths of files and folders, at any depth, that no run writes."""
        for entry in self.path.rglob("*"):
            place = entry.relative_to(self.path)
            if entry.is_dir() and not entry.is_symlink():
                ours = place.parts[0] in _FOLDERS
            else:
                ours = bool(_WRITTEN.fullmatch(place.with_name(drafted(place.name)).as_posix()))
            if not ours:
                yield str(place)

    def _is_run(self) -> bool:
        """Return whether the folder holds a run: it has a lock file or recorded evaluations.

        Names such as config.toml and logs/ prove nothing, because other programs use them too.
        """
        if any(self.path.glob(LOCK)) or any(self.path.glob(f"state/*/{LOCK}")):
            return True
        try:
            return bool(_read_evaluations(self.path))
        except (OSError, ValueError, TypeError):
            return False

    def _remove(self, names: Sequence[str]) -> None:
        for state in self.path.glob("state/*/") if "state" in names else ():
            HeldFolder(state).close()  # fails if a client still uses the folder
        for name in names:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        self._held.close()

    def append(self, evaluation: Evaluation) -> None:
        """Add one evaluation. It is in the file when this returns, even if the process is killed then."""
        with self._history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(evaluation), allow_nan=False) + "\n")

    def keep_scores(self, scores: "pl.DataFrame") -> None:
        """Write the labels and scores of the held-out rows to a file that only its owner can read."""
        content = io.BytesIO()
        scores.write_parquet(content)
        write_atomically(self.path / SCORES, content.getvalue(), private=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary atomically. The run counts as finished from then on."""
        write_atomically(self.path / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())


def _read_evaluations(path: Path) -> list[Evaluation]:
    lines = (path / HISTORY).read_text(encoding="utf-8").splitlines()
    return [Evaluation(**json.loads(line)) for line in lines]


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that affect a result."""
    packages = {name: version(name) for name in ("vafl", "torch", "numpy")}
    return {"python": platform.python_version(), **packages, "kernels": "native" if NATIVE else "portable"}


@dataclass(frozen=True)
class RecordedRun:
    """A finished run, read from its folder."""

    name: str
    path: Path
    summary: Mapping[str, Any]
    evaluations: Sequence[Evaluation]

    @property
    def metric(self) -> str:
        """The name of the headline metric."""
        return str(self.summary["metric"]["name"])

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in LOWER_IS_BETTER

    @property
    def watched(self) -> str:
        """The rows that the evaluations use, "validation" or "test"."""
        return str(self.summary["watched"])

    @property
    def measured(self) -> list[tuple[Evaluation, float]]:
        """The evaluations that define the headline metric, and its values."""
        return [(each, each.metric) for each in self.evaluations if each.metric is not None]

    def kept(self, rows: str) -> Mapping[str, float | None]:
        """Return every metric of the kept models on "validation" or "test" rows; empty if unknown."""
        return self.summary["kept"][rows] or {}

    def baseline(self, name: str, rows: str) -> Mapping[str, float | None]:
        """Return every metric of a baseline on "validation" or "test" rows; empty if unknown."""
        figures: Mapping[str, float | None] = self.summary["baselines"].get(name, {}).get(rows, {})
        return figures

    @property
    def validation(self) -> float | None:
        """The headline metric of the kept models on the validation rows; None if unknown."""
        return self.kept("validation").get(self.metric)

    @property
    def test(self) -> float | None:
        """The headline metric of the kept models on the test rows; None if unknown."""
        return self.kept("test").get(self.metric)

    @property
    def never_uploaded(self) -> list[str]:
        """The parties that never uploaded. The model has learnt nothing from their data."""
        return [name for name, count in self.summary.get("activations", {}).items() if not count]

    def by(self, metric: str) -> "RecordedRun":
        """Return the run with another of its metrics as the headline."""
        evaluations = [replace(each, metric=each.metrics.get(metric)) for each in self.evaluations]
        value = self.kept(self.watched).get(metric)
        return replace(
            self,
            evaluations=evaluations,
            summary={**self.summary, "metric": {"name": metric, "value": value}},
        )

    def first_reaching(self, target: float) -> Evaluation | None:
        """Return the first evaluation that is at least as good as `target`; None if there is none."""
        sign = 1 if self.higher_is_better else -1
        return next((evaluation for evaluation, value in self.measured if sign * (value - target) >= 0), None)


def read_run(path: Path) -> RecordedRun:
    """Read the folder of a finished run.

    Raises:
        RunFolderError: the folder is missing or damaged, or the run has not finished.
    """
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        evaluations = _read_evaluations(path)
        if not evaluations:
            raise ValueError("it has no evaluation")
        if missing := [name for name in _NEEDED if name not in summary]:
            raise ValueError(f"{SUMMARY} has no {', '.join(missing)}")
    except FileNotFoundError as error:
        raise RunFolderError(
            "VFL-8027",
            f'"{path}" must be the folder of a finished run. It has no {Path(error.filename).name}. Wait '
            "until the run has finished, or choose another folder.",
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(
            "VFL-8028",
            f'"{path}" must be the folder of a finished run. It is damaged: {error}. Restore it, or run '
            "again.",
        ) from error
    run = RecordedRun(path.resolve().name, path, summary, evaluations)
    # A run that was resumed with another model.metric has evaluations with different headline metrics. Every
    # evaluation has all metrics, so select the final one everywhere.
    return run.by(run.metric)
