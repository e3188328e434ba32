import pickle

import pytest

from tests.errors_page import ROOT, errors_page, raised
from vafl import errors


@pytest.mark.parametrize(
    ("kind", "code", "also"),
    [
        (errors.ConfigError, 2, ValueError),
        (errors.DataError, 3, ValueError),
        (errors.RunError, 4, RuntimeError),
        (errors.Diverged, 4, errors.RunError),
        (errors.Stalled, 4, errors.RunError),
        (errors.RunFolderError, 5, OSError),
        (errors.RemoteFault, 7, errors.VaflError),
        (errors.InvalidMessage, 7, errors.RemoteFault),
        (errors.Unauthenticated, 7, errors.RemoteFault),
    ],
)
def test_every_error_has_its_place_and_its_exit_code(kind, code, also):
    assert issubclass(kind, errors.VaflError)
    assert issubclass(kind, also)
    assert kind.exit_code == code
    assert f"{kind.__name__} " in errors.__doc__
    with pytest.raises(errors.VaflError, match=r"^VFL-0001: because$") as caught:
        raise kind("VFL-0001", "because")
    assert (caught.value.code, caught.value.message) == ("VFL-0001", "because")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_tree_leaves_none_out():
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(kind.__name__ in errors.__doc__ for kind in kinds)


def test_every_error_has_a_code_and_no_two_have_the_same():
    codes = [each.code for each in raised()]
    assert len(codes) > 400
    assert len(codes) == len(set(codes))


def test_the_page_of_errors_is_what_the_code_says():
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == errors_page()
