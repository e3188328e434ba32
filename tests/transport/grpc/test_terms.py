"""Which terms of a run and which network settings are accepted or refused."""

import dataclasses
import json

import pytest

from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.schedule import BatchSchedule
from vafl.transport.grpc.terms import JOINS, RunTerms, flat_settings, schedule_digest
from vafl.transport.settings import NetworkSettings

TERMS = RunTerms(1, "run", 100, "abc", [3, 4], 2, "def", "float32", {"rule.t": "2"})


def test_terms_survive_the_way():
    assert RunTerms.from_bytes(TERMS.to_bytes()) == TERMS
    assert TERMS.difference(TERMS) == ""


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(RunTerms) if field.name != "settings"]
)
def test_every_difference_is_named(field):
    value = getattr(TERMS, field)
    more = {int: 1, str: "x", list: [5]}[type(value)]
    other = dataclasses.replace(TERMS, **{field: value + more})
    assert TERMS.difference(other).startswith(f"{field} {value!r} at the server")


def test_digests_are_shown_where_nothing_else_says_what_differs():
    other = dataclasses.replace(TERMS, record_digest="x", schedule_digest="y", settings={"rule.t": "3"})
    assert TERMS.difference(other) == "rule.t 2 at the server, 3 at the client"
    alone = dataclasses.replace(TERMS, record_digest="x")
    assert TERMS.difference(alone) == "record_digest 'abc' at the server, 'x' at the client"


def test_parties_start_from_the_same_earlier_run_and_a_new_one_joins():
    earlier, other, joins, new = (
        dataclasses.replace(TERMS, from_earlier_run=run) for run in ("0a1b", "2c3d", JOINS, "")
    )
    assert not earlier.difference(earlier)
    assert not earlier.difference(joins)
    assert earlier.difference(other) == "from_earlier_run '0a1b' at the server, '2c3d' at the client"
    assert earlier.difference(new)
    assert new.difference(earlier)
    assert new.difference(joins)


def test_long_settings_are_told_apart_and_fit():
    groups = {f"party-{number}": [f"column-{place}" for place in range(99)] for number in range(64)}
    long, other = (flat_settings({"partition": {"groups": {**groups, "z": ends}}}) for ends in (["a"], ["b"]))
    assert long != other
    terms = dataclasses.replace(TERMS, settings={f"section.{n}": long["partition.groups"] for n in range(50)})
    assert RunTerms.from_bytes(terms.to_bytes()) == terms
    assert len(terms.difference(TERMS)) <= 1000


def test_another_versions_terms_are_said_to_be_that():
    before = {**dataclasses.asdict(TERMS), "protocol": 2, "secure_sum": False}
    with pytest.raises(InvalidMessage, match="VFL-6132"):
        RunTerms.from_bytes(json.dumps(before).encode())


@pytest.mark.parametrize(
    ("widths", "code"), [([3, "4"], "VFL-6135"), ([3, True], "VFL-6135"), (3, "VFL-6133")]
)
def test_widths_are_numbers(widths, code):
    with pytest.raises(InvalidMessage, match=code):
        RunTerms.from_bytes(json.dumps({**dataclasses.asdict(TERMS), "widths": widths}).encode())


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"[]", b"{}", b"[" * 3000, b'{"protocol": 1}', b"\xff\xfe", b"x" * 5000],
)
def test_anything_but_terms_is_refused(content):
    with pytest.raises(InvalidMessage):
        RunTerms.from_bytes(content)


def test_terms_of_the_wrong_types_are_refused():
    wrong = TERMS.to_bytes().replace(b'"records": 100', b'"records": "100"')
    with pytest.raises(InvalidMessage, match=r"VFL-6133.*records.*int"):
        RunTerms.from_bytes(wrong)
    with pytest.raises(InvalidMessage, match="VFL-6134"):
        RunTerms.from_bytes(TERMS.to_bytes().replace(b'"rule.t": "2"', b'"rule.t": 2'))


def test_schedules_are_told_apart_by_what_they_deal_out():
    def digest(**changes):
        options = {"kind": "epochs", "rows": 50, "batch_size": 5, "seed": 0, "stream": 1, **changes}
        return schedule_digest([BatchSchedule(**options)])

    assert digest() == digest()
    others = [digest(seed=1), digest(stream=2), digest(batch_size=6), digest(rows=51), digest(kind="iid")]
    assert len({digest(), *others}) == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"address": "nowhere"}, "VFL-6251"),
        ({"heartbeat": 0.0}, r"VFL-6252.*heartbeat"),
        ({"patience": float("nan")}, r"VFL-6252.*patience"),
        ({"largest_norm": -1.0}, r"VFL-6253.*largest_norm"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        NetworkSettings(**settings)
