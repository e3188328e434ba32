"""The ids of each site, half of them common. NVFlare sends this file to its sites."""

import time
from pathlib import Path

from nvflare.app_common.psi.psi_spec import PSI


class Ids(PSI):  # type: ignore[misc]  # only NVFlare's own environment has it
    """Provides `count` ids, and records when they are first read and when the intersection is saved."""

    def __init__(self, count: int, marks: str) -> None:
        super().__init__("psi_writer")
        self.count, self.marks = count, marks

    def load_items(self) -> list[str]:
        self._mark("loaded")
        first = 0 if self.fl_ctx.get_identity_name() == "site-1" else self.count // 2
        return [str(number) for number in range(first, first + self.count)]

    def save(self, intersection: list[str]) -> None:
        super().save(intersection)
        self._mark(f"saved {len(intersection)}")

    def _mark(self, event: str) -> None:
        with Path(self.marks).open("a") as file:
            file.write(f"{time.time()} {event}\n")
