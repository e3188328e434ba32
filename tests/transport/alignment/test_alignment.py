"""Results and failures of alignments over real sockets."""

import asyncio

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.transport.alignment.parties import Alignments, align
from vafl.data.alignment.curve import POINT
from vafl.errors import DataError, RunError
from vafl.transport.alignment.frames import Kind
from vafl.transport.alignment.stream import AlignmentStream

IDS = st.lists(st.integers(0, 60).map(lambda n: f"c{n:03}"), min_size=40, max_size=60, unique=True)


@settings(max_examples=12)
@given(st.lists(IDS, min_size=2, max_size=5), st.sampled_from(["common", "labelled"]))
def test_it_is_the_plain_intersection_for_two_to_five_parties(sets, records):
    names = ["server", *(f"client-{n}" for n in range(1, len(sets)))]
    parties = dict(zip(names, sets, strict=True))
    rows = set.intersection(*map(set, sets)) if records == "common" else set(sets[0])
    assume(rows)
    kept, _ = align(records=records, **parties)
    server = kept["server"]
    numbers = dict(zip(server.ids.to_list(), server.numbers.tolist(), strict=True))
    assert set(numbers) == rows
    assert sorted(numbers.values()) == list(range(len(rows)))
    for name, own in parties.items():
        found = kept[name]
        assert (found.token, found.rows, found.classes) == (server.token, len(rows), ("no", "yes"))
        expected = {text: numbers[text] for text in own if text in rows}
        assert dict(zip(found.ids.to_list(), found.numbers.tolist(), strict=True)) == expected
        if name == "server":
            held = {other: server.ids.filter(has).to_list() for other, has in found.holders.items()}
            assert held == {
                other: [text for text in server.ids if text in parties[other]] for other in names[1:]
            }
        else:
            assert not found.holders


def test_row_numbers_and_tokens_are_drawn_anew():
    ids = [f"c{n}" for n in range(50)]
    one, other = (align(server=ids, bank=ids, classes=None)[0]["bank"] for _ in range(2))
    assert one.token != other.token
    assert one.ids.to_list() != other.ids.to_list()
    assert one.ids.to_list() != ids
    assert one.classes is None


def test_what_is_said_holds_no_id_and_no_bytes_of_an_earlier_alignment(monkeypatch):
    said = []
    honest = AlignmentStream.send

    async def recorded(line, content):
        said.append(bytes(content))
        await honest(line, content)

    monkeypatch.setattr(AlignmentStream, "send", recorded)
    ids = [f"customer-{n:06}" for n in range(20)]
    points = []
    for _ in range(2):
        said.clear()
        align(server=ids, bank=ids[5:])
        assert not [text for text in ids for content in said if text.encode() in content]
        blinded = b"".join(content[1:] for content in said if content[0] == Kind.POINTS)
        points.append({blinded[place : place + POINT] for place in range(0, len(blinded), POINT)})
        assert len(points[-1]) == 35
    assert not points[0] & points[1]


def test_progress_counts_every_id():
    async def story():
        made = Alignments(server=["a", "b", "c"], bank=["b", "c"], shop=["c", "d", "e", "f"])
        await made.all()
        return {name: (shown.done, shown.total) for name, shown in made.progress.items()}

    assert asyncio.run(story()) == {"server": (12, 12), "bank": (5, 5), "shop": (7, 7)}


def test_ids_in_other_formats_are_told_apart_from_ids_of_others():
    numbers = [str(n) for n in range(1, 30)]
    padded = [f"{n:06}" for n in range(1, 30)]
    kept, results = align(server=numbers, bank=padded, shop=numbers)
    assert not kept
    assert isinstance(results["server"], DataError)
    for party in ("server", "bank"):
        assert "Those of bank and of the server" in str(results[party])
    assert "bank" not in str(results["shop"])
    kept, results = align(server=numbers, bank=[f"x{n}" for n in range(1, 30)])
    assert not kept
    assert "bank has none of them" in str(results["server"])
    assert "bank has none of them" in str(results["bank"])


def test_what_fails_at_one_party_is_not_told_to_the_others():
    """The others learn neither that the bank has no common ids, nor the names of the server's files."""
    people = [f"p{n}" for n in range(30)]
    _, results = align(server=people, bank=["x", "y"], shop=people)
    assert "bank has none of them" in str(results["bank"])

    def full(_):
        raise OSError(28, "No space left on device", "/srv/lender/secret-project/labels.parquet")

    async def story():
        made = Alignments(server=people, bank=people, shop=people)
        made.server._keep = full
        return await made.all()

    server, bank, shop = asyncio.run(story())
    assert isinstance(server, OSError)
    for error in (results["shop"], bank, shop):
        assert error.code == "VFL-6001"
        assert "bank" not in str(error)
        assert "secret" not in str(error)


def test_few_common_ids_are_enough_where_no_format_explains_it():
    many = [f"s{n}" for n in range(300)]
    kept, _ = align(server=[*many, "both"], bank=[*(f"b{n}" for n in range(300)), "both"])
    assert kept["bank"].ids.to_list() == ["both"]


def test_pairwise_overlaps_alone_are_no_common_records():
    sets = {"server": ["a", "b"], "bank": ["a", "x"], "shop": ["b", "y"]}
    _, results = align(**sets)
    assert "Found none, though each client has some" in str(results["shop"])
    assert isinstance(results["shop"], RunError)
    kept, _ = align(records="labelled", **sets)
    assert kept["shop"].ids.to_list() == ["b"]
