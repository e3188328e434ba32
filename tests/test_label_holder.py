"""A label holder with features: one party in the configuration, one client more in the run."""

import pytest
import torch

from tests.companies import add_own_columns, configuration, document, write_companies
from tests.federation import parameters, same
from vafl.build import build
from vafl.names import LOCAL_CLIENT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("companies")
    write_companies(path)
    add_own_columns(path)
    return path


def explicit(folder, **sections):
    """The same federation as it had to be written before: the label holder's features as a third client."""
    tables = document(folder)["tables"]
    lender = {**tables["server"], "alignment": str(folder / "lender.alignment.parquet")}
    del lender["label"]
    tables = {**tables, "server": {**tables["server"], "ignore": ["*"]}, "lender": lender}
    data = {**sections.pop("data", {}), "parties": ["bank", "shop", "lender"]}
    return configuration(folder, data=data, tables=tables, **sections)


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_a_simulation_is_that_of_an_explicit_third_client(folder, records):
    data = {"records": records}
    own, other = build(configuration(folder, data=data)), build(explicit(folder, data=data))
    assert [party.name for party in own.data.parties] == ["bank", "shop", LOCAL_CLIENT]
    assert torch.equal(own.data.parties[2].train, other.data.parties[2].train)
    assert own.data.parties[2].train.shape[1] >= 3, "rating, and a branch of two"
    assert own.train()[-1].metrics == other.train()[-1].metrics
    assert same(parameters(own), parameters(other))


def test_ignoring_all_of_its_columns_leaves_the_label_holder_without_a_client(folder):
    tables = document(folder)["tables"]
    run = build(configuration(folder, tables={**tables, "server": {**tables["server"], "ignore": ["*"]}}))
    assert [party.name for party in run.data.parties] == ["bank", "shop"]
