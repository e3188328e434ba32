"""Records that the party's own code reads, and everything that such code may get wrong."""

import pytest

from tests.data.sources.making import fitted, opened, python, wanted
from vafl.data.source_settings import PythonSettings
from vafl.errors import ConfigError, DataError


def test_records_are_read_by_the_party_s_own_code():
    source = opened(python(shape=(2, 3)))
    encoder, (report,) = fitted(source, wanted("P1"))
    assert encoder.shape == (2, 3)
    assert report.features == 6
    assert encoder.read(source, wanted("P4", "P2"), 2)[:, 0, 0].tolist() == [4, 2]
    with pytest.raises(DataError, match="VFL-2420"):
        encoder.read(opened(python(shape=(3, 2))), wanted("P1"), 1)


def used(options):
    source = opened(python(**options))
    source.ids()
    fitted(source, wanted("P0"))[0].read(source, wanted("P0", "P1"), 2)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"wrong": "ids"}, "VFL-2412"),
        ({"wrong": "kinds"}, r"VFL-2412.*int, str"),
        ({"wrong": "twice"}, "VFL-2034"),
        ({"wrong": "fails"}, r"VFL-2418.*KeyError.*lost"),
        ({"wrong": "text"}, "VFL-2413"),
        ({"wrong": "short"}, r"VFL-2414.*\[2, 2\].*\[1, 2\]"),
        ({"wrong": "nan"}, r'VFL-2415.*"P0"'),
        ({"shape": (0,)}, "VFL-2419"),
        ({"shape": "wide"}, "VFL-2419"),
        ({"shape": (2.0,)}, "VFL-2419"),
        ({"unknown": 1}, "VFL-2418"),
    ],
)
def test_code_that_breaks_a_rule_is_named(options, code):
    with pytest.raises(DataError, match=code) as error:
        used(options)
    assert "making" in str(error.value)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="VFL-2416"):
        opened(PythonSettings("no_such_module:Factory"))
    with pytest.raises(ConfigError, match="VFL-2416"):
        opened(python("Recordz"))
    with pytest.raises(ConfigError, match="VFL-2417"):
        opened(python("number"))
    with pytest.raises(DataError, match=r"VFL-2411.*ids"):
        opened(python("incomplete"))


def test_a_file_that_options_name_changes_the_fingerprint(tmp_path):
    file = tmp_path / "rows.bin"
    file.write_bytes(b"1")
    settings = PythonSettings("tests.data.sources.making:Records", {"wrong": str(file)})
    before = opened(settings).fingerprint()
    assert opened(settings).fingerprint() == before
    file.write_bytes(b"22")
    assert opened(settings).fingerprint() != before
