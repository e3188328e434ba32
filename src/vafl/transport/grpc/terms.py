"""The terms that every party must agree on before a stream carries anything else.

A client sends its terms as the first message of its stream, and the server compares them with its own.
`admission.agree` does that for training, prediction and alignment alike.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, get_origin, get_type_hints

from vafl.errors import InvalidMessage
from vafl.protocol.schedule import BatchSchedule
from vafl.transport.grpc.wire import LARGEST_TERMS, printable

JOINS = "joins"  # no run has this name: it is not hexadecimal
_LONGEST_SETTING = 120  # characters of a setting; longer ones are cut and get a digest


@dataclass(frozen=True)
class Terms:
    """The terms of a stream. Subclasses add fields.

    Attributes:
        protocol: version of the stream's protocol.
        run_id: network.run_id.
    """

    protocol: int
    run_id: str

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read terms that another party has sent.

        Raises:
            InvalidMessage: the content is too long, not JSON, or has other fields or types.
        """
        if len(content) > LARGEST_TERMS:
            raise InvalidMessage(
                "VFL-6131",
                f"terms must have at most {LARGEST_TERMS} bytes. Found {len(content):,}. Use the same "
                "version of vafl at every party.",
            )
        try:
            values = json.loads(content)
            terms = cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidMessage(
                "VFL-6132",
                "a stream must begin with the terms of its protocol. Found other content. Use the same "
                "version of vafl at every party.",
            ) from error
        for name, hint in get_type_hints(cls).items():
            kind = get_origin(hint) or hint
            value_kind = type(getattr(terms, name))
            if value_kind is not kind:
                raise InvalidMessage(
                    "VFL-6133", f"{name} in the terms must be {kind.__name__}. Found {value_kind.__name__}."
                )
        return terms

    def entries(self) -> dict[str, str]:
        """Return every term by its name, as text for people."""
        return {name: repr(value) for name, value in vars(self).items()}

    def difference(self, other: "Terms") -> str:
        """Describe the terms that differ; empty if none do. `self` are the server's, `other` a client's."""
        entries = differing(self.entries(), other.entries())
        return printable("; ".join(f"{name} {a} at the server, {b} at the client" for name, a, b in entries))


@dataclass(frozen=True)
class RunTerms(Terms):
    """The terms of a run.

    Attributes:
        records: number of records.
        record_digest: digest of the aligned records.
        widths: the embedding width of each client.
        clients: number of clients.
        schedule_digest: see `schedule_digest`.
        encoding: network.encoding.
        settings: dotted name -> value, as `flat_settings` writes them; empty if `model` determines them.
        model: the trained model that is used; empty while one is trained.
        from_earlier_run: the run whose models this one starts from; empty if all models are new. JOINS at a
            client that was not in that run.
    """

    records: int
    record_digest: str
    widths: list[int]
    clients: int
    schedule_digest: str
    encoding: str
    settings: dict[str, str] = field(default_factory=dict)
    model: str = ""
    from_earlier_run: str = ""

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        terms = super().from_bytes(content)
        if not all(type(value) is str for value in terms.settings.values()):
            raise InvalidMessage("VFL-6134", "every setting in the terms must be text. Found another type.")
        if not all(type(width) is int for width in terms.widths):
            raise InvalidMessage("VFL-6135", "every width in the terms must be a number. Found another type.")
        return terms

    def entries(self) -> dict[str, str]:
        """Return every term and setting by its name, as text for people."""
        entries = super().entries()
        del entries["settings"]
        return entries | self.settings

    def difference(self, other: Terms) -> str:
        """Describe the terms that differ. A client that joins agrees with any earlier run."""
        if isinstance(other, RunTerms) and self.from_earlier_run and other.from_earlier_run == JOINS:
            other = replace(other, from_earlier_run=self.from_earlier_run)
        return super().difference(other)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, our value, their value) of all terms that differ.

    Leave out digests if anything else differs: they do not tell people what to change.
    """
    names = dict.fromkeys([*ours, *theirs])
    entries = [(name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in names]
    entries = [entry for entry in entries if entry[1] != entry[2]]
    return [entry for entry in entries if not entry[0].endswith("_digest")] or entries


def flat_settings(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, by dotted name. A long one is cut and followed by a digest of all of it."""
    flat: dict[str, str] = {}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            text = json.dumps(value, sort_keys=True)
            if len(text) > _LONGEST_SETTING:
                text = f"{text[:_LONGEST_SETTING]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
            flat[f"{section}.{name}".removesuffix(".")] = text
    return flat


def schedule_digest(schedules: list[BatchSchedule]) -> str:
    """Return a digest of the first two batches of each schedule.

    It changes with the seed, the kind of schedule, the batch size and versions of libraries that deal out
    other batches.
    """
    digest = hashlib.sha256()
    for schedule in schedules:
        digest.update(schedule.batch(0).tobytes() + schedule.batch(1).tobytes())
    return digest.hexdigest()[:16]
