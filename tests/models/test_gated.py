import pytest
import torch

from vafl.models.gated import GatedHead

WIDTHS = [1, 5, 3]
COLUMNS = [slice(0, 1), slice(1, 6), slice(6, 9)]


@pytest.fixture
def head():
    torch.manual_seed(0)
    made = GatedHead(WIDTHS, 2, [4]).eval()
    for party in made.parties:
        torch.nn.init.normal_(party.weight, std=0.3)
    return made


def test_all_gates_start_at_1():
    assert torch.equal(GatedHead(WIDTHS, 2, [4]).gates(torch.randn(6, 9)), torch.ones(6, 3))


def test_a_gate_depends_on_its_own_embedding_only(head):
    embeddings = torch.randn(6, 9)
    before = head.gates(embeddings)
    assert ((before > 0) & (before < 2)).all()
    for party, columns in enumerate(COLUMNS):
        changed = embeddings.clone()
        changed[:, columns] = torch.randn(6, WIDTHS[party])
        others = [other for other in range(3) if other != party]
        after = head.gates(changed)
        assert torch.equal(after[:, others], before[:, others])
        assert not torch.allclose(after[:, party], before[:, party])


@pytest.mark.parametrize("hidden", [(), (4,), (4, 3)])
def test_a_party_behind_a_closed_gate_is_ignored(hidden):
    head, embeddings = GatedHead(WIDTHS, 2, hidden).eval(), torch.randn(6, 9)
    outputs = head(embeddings)
    assert outputs.shape == (6, 2)
    changed = embeddings.clone()
    changed[:, COLUMNS[1]] = 100.0
    assert not torch.allclose(head(changed), outputs)
    with torch.no_grad():
        head.parties[1].bias[-1] = -100.0
    assert torch.equal(head(changed), head(embeddings))


def test_outputs_of_a_regression_have_the_unit_of_the_labels(head):
    before, embeddings = head(torch.ones(1, 9)), torch.ones(1, 9)
    head.measure(torch.tensor([90.0, 100.0, 110.0]))
    torch.testing.assert_close(head(embeddings), head.centre + head.unit * before)
    assert head.unit > 1
