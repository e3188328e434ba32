"""Names and patterns select a party's columns."""

import pytest

from vafl.data.columns import match_columns
from vafl.errors import DataError


def test_a_name_with_brackets_means_itself():
    assert match_columns(["dose[mg]", "dosem"], {"a": ("dose[mg]",)}) == {"a": [0]}


def test_a_pattern_means_what_it_matches():
    assert match_columns(["pay_1", "age", "pay_2"], {"a": ("pay_?",), "b": ("age",)}) == {
        "a": [0, 2],
        "b": [1],
    }


def test_a_party_without_columns_is_refused():
    with pytest.raises(DataError, match=r"VFL-2081.*partition\.groups\.b"):
        match_columns(["age"], {"a": ("age",), "b": ()})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"bank": ("agee",)}, r'VFL-2084.*parties\.bank.*agee.* Did you mean "age"\?'),
        ({"bank": ("age",), "shop": ("a*",)}, r"VFL-2082.*parties"),
    ],
)
def test_errors_call_the_setting_what_the_user_calls_it(groups, message):
    with pytest.raises(DataError, match=message):
        match_columns(["age"], groups, setting="parties")
