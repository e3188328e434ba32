"""All states in which a crash can leave a folder, given what was synced when."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Left:
    """The state after a crash.

    Attributes:
        files: name -> content.
        noted: what `note` returned just before the crash.
    """

    files: dict
    noted: object

    def restore(self, folder):
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


class Recorder:
    """Records a folder at every sync. Disks may write in any order between two syncs.

    Args:
        note: called at every sync; its result is kept with the record.
    """

    def __init__(self, folder, monkeypatch, note):
        self._folder, self._note, self._pictures = folder, note, []
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(f"os.{name}", self._recorded(getattr(os, name)))
        self._take()

    def _recorded(self, sync):
        def synced(file):
            sync(file)
            self._take()

        return synced

    def _take(self):
        files = {entry.name: (entry.stat().st_ino, entry.read_bytes()) for entry in self._folder.iterdir()}
        self._pictures.append((files, self._note()))

    def crashes(self):
        """Yield each state that a crash between two syncs can leave."""
        for (before, _), (after, noted) in zip(self._pictures, self._pictures[1:], strict=False):
            changed = [name for name in after if name in before and _is_written(before[name], after[name])]
            assert len(changed) <= 1, f"{changed} are written without a sync between them"
            for files in (before, after):
                yield Left({name: content for name, (_, content) in files.items()}, noted)
            for name in changed:
                for content in _torn(before[name][1], after[name][1]):
                    yield Left({other: own for other, (_, own) in after.items()} | {name: content}, noted)


def _is_written(before, after):
    """Return whether a file was written in place. After a rename, a crash leaves the old or the new file."""
    return before[0] == after[0] and before[1] != after[1]


def _torn(before, after):
    """Yield part of the new bytes, followed by the old ones, by nothing, or by zeros (unwritten blocks)."""
    first = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    last = len(after) if len(after) > len(before) else len(after.rstrip(b"\0"))
    for cut in sorted({first, *range(first, last, max(1, (last - first) // 12)), last - 1}):
        yield after[:cut] + before[cut:]
        if len(after) > len(before):
            yield after[:cut] + bytes(len(after) - cut)
