"""`vafl align` as its users start it: real processes in separate folders, over mutual TLS."""

import signal
import subprocess
import sys

import polars as pl
import pytest

from vafl.cli import main
from vafl.data.alignment.rows import Alignment
from vafl.transport.identity import issue, make_authority

LIMIT = 120
PARTIES = ("server", "bank", "shop")
CONFIG = """
[data]
name = "parties"
parties = ["bank", "shop"]
[parties.{party}.source]
path = "own.csv"
id = "customer"
{label}
[network]
address = "{address}"
certificates = "."
patience = 60.0
heartbeat = {heartbeat}
"""


class Companies:
    """Each in its own folder, which holds its own table, certificate and configuration."""

    def __init__(self, folder):
        make_authority(folder / "authority")
        self.folder, self.processes = folder, {}
        for party in PARTIES:
            issue(folder / "authority", party)
            (folder / "authority" / party).rename(folder / party)

    def write(self, party, ids, address="127.0.0.1:0", heartbeat=10.0):
        label = 'label = "paid"' if party == "server" else ""
        config = CONFIG.format(party=party, label=label, address=address, heartbeat=heartbeat)
        (self.folder / party / "run.toml").write_text(config)
        other = pl.Series("paid", [["no", "yes"][n % 2] for n in range(len(ids))])
        pl.DataFrame({"customer": pl.Series(ids)}).with_columns(other).write_csv(
            self.folder / party / "own.csv"
        )

    def start(self, party, *options):
        command = [sys.executable, "-m", "vafl.cli", "align", "run.toml", "--party", party, *options]
        self.processes[party] = subprocess.Popen(
            command, cwd=self.folder / party, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.processes[party]

    def serve(self):
        line = self.start("server").stdout.readline()
        assert line.startswith("listening on "), self.end("server")
        return line.split()[-1]

    def end(self, party):
        """Return the exit code and the output."""
        said = self.processes[party].communicate(timeout=LIMIT)
        return self.processes[party].returncode, "".join(said)

    def found(self, party):
        return Alignment.read(self.folder / party / f"{party}.alignment.parquet")


@pytest.fixture
def companies(tmp_path):
    made = Companies(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.communicate()


def test_companies_that_share_nothing_but_an_address(companies, capsys):
    ids = {
        "server": [f"{n:05}" for n in range(0, 10_200)],  # enough for worker processes
        "bank": [f"{n:05}" for n in range(10_199, 5_999, -1)],
        "shop": [f"{n:05}" for n in range(0, 10_200, 3)],
    }
    companies.write("server", ids["server"])
    address = companies.serve()
    for party in ("bank", "shop"):
        companies.write(party, ids[party], address)
        companies.start(party)
    ends = {party: companies.end(party) for party in PARTIES}
    assert {code for code, _ in ends.values()} == {0}, ends
    found = {party: companies.found(party) for party in PARTIES}
    assert {own.token for own in found.values()} == {found["server"].token}
    for own in found.values():
        assert own.ids.to_list() == found["server"].ids.to_list()
        assert (own.label, own.classes) == ("paid", ("no", "yes"))
    assert set(found["shop"].ids) == set.intersection(*map(set, ids.values()))
    assert "1,400 of 10,200 records are among the 1,400 rows" in ends["server"][1]
    assert main(["data", str(companies.folder / "bank" / "run.toml")]) == 3
    refusal = " ".join(capsys.readouterr().err.split())
    assert all(part in refusal for part in ("VFL-2003", '"paid"', "parties.bank.source.ignore"))


@pytest.mark.parametrize(
    ("victim", "codes"),
    [
        ("bank", {"server": ("VFL-6054", "bank went away"), "shop": ("VFL-6054", "bank went away")}),
        ("server", {"bank": ("VFL-6003", "was lost"), "shop": ("VFL-6003", "was lost")}),
    ],
)
def test_a_frozen_party_is_noticed_by_its_heartbeats_long_before_patience_ends(companies, victim, codes):
    ids = [f"{n:05}" for n in range(8_000)]  # enough for seconds of work
    companies.write("server", ids, heartbeat=2.0)
    address = companies.serve()
    for party in ("bank", "shop"):
        companies.write(party, ids, address, heartbeat=2.0)
        companies.start(party)
    for party in ("bank", "shop"):
        lines = iter(companies.processes[party].stderr)
        assert any("the server has" in line for line in lines)  # the exchange has begun
    companies.processes[victim].send_signal(signal.SIGSTOP)
    try:
        ends = {party: companies.end(party) for party in codes}
    finally:
        companies.processes[victim].send_signal(signal.SIGCONT)
    for party, (code, words) in codes.items():
        assert ends[party][0] == 4, ends
        assert code in ends[party][1]
        assert words in ends[party][1]
