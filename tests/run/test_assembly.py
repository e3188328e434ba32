from dataclasses import replace

import pytest
import torch
from threadpoolctl import threadpool_info

from tests.federation import parameters, run_of, same, vertical_data
from vafl.config import Config, from_document
from vafl.data.public import load
from vafl.data.split import Parts
from vafl.errors import ConfigError, DataError
from vafl.protocol.refresh import Lookahead, NoRefresh, RandomRefresh, RefreshAll
from vafl.run.assembly import build, make_refresh, make_schedule, with_drawn_labels
from vafl.run.plan import Task, make_plan
from vafl.simulation.simulator import Simulator


def config(**sections) -> Config:
    return from_document(sections)


# --- the task that the labels imply ---


@pytest.mark.parametrize(
    ("classes", "settings", "outputs", "loss", "metric"),
    [
        (3, {}, 3, "softmax", "accuracy"),
        (2, {}, 1, "binary", "auc"),
        (2, {"metric": "accuracy"}, 1, "binary", "accuracy"),
        (2, {"loss": "softmax"}, 2, "softmax", "auc"),
        (0, {}, 1, "squared", "r2"),
        (0, {"metric": "loss"}, 1, "squared", "rmse"),
        (3, {"loss": "squared"}, 1, "squared", "r2"),
    ],
)
def test_loss_outputs_and_metric_follow_from_the_labels(classes, settings, outputs, loss, metric):
    task = Task.of(config(model=settings), vertical_data(classes=classes))
    assert (task.outputs, task.loss, task.metrics.headline.name) == (outputs, loss, metric)


@pytest.mark.parametrize(
    ("classes", "settings", "said"),
    [
        (
            3,
            {"loss": "binary"},
            r"VFL-3038.*binary.*3 classes",
        ),
        (0, {"loss": "softmax"}, r"VFL-3038.*softmax.*numbers"),
        (3, {"metric": "r2"}, r"VFL-3021.*model\.metric.*classes.*r2"),
    ],
)
def test_a_loss_or_metric_that_does_not_fit_is_refused(classes, settings, said):
    with pytest.raises(ConfigError, match=said):
        build(config(model=settings), vertical_data(rows=40, classes=classes))


@pytest.mark.parametrize(("classes", "dtype"), [(3, torch.int64), (2, torch.float32), (0, torch.float32)])
def test_labels_have_the_type_their_loss_wants(classes, dtype):
    run = run_of(vertical_data(classes=classes))
    assert run.data.labels.dtype == dtype
    assert run.train()[-1].updates == 20


# --- checks before anything is trained ---


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rule": {"name": "t-sync", "t": 3}}, r"VFL-4196.*2.*3"),
        ({"schedule": {"batch_size": 21}}, r"VFL-4094.*20.*21"),
        ({"delays": {"seconds": [1.0]}}, r"VFL-6808.*2.*1"),
        (
            {"delays": {"dropouts": [{"client": 3, "start": 0.0, "end": 1.0}]}},
            r"VFL-6809.*2.*3",
        ),
        ({"embedding": {"model": "cnn"}}, "VFL-3011"),
        ({"model": {"width": 5}}, r"VFL-3039.*3.*5"),
    ],
)
def test_what_only_the_data_can_tell_is_checked_before_training(sections, said):
    with pytest.raises(ConfigError, match=said):
        run_of(vertical_data(rows=20, clients=2), **sections)


@pytest.mark.parametrize(
    ("classes", "metric", "validation", "said"),
    [
        (2, "auc", 0, r"VFL-7152.*8.*test"),
        (2, "auc", 3, r"VFL-7152.*5.*test"),
        (0, "r2", 7, r"VFL-7152.*1.*test"),
    ],
)
def test_a_metric_that_would_be_no_number_is_refused_before_training(classes, metric, validation, said):
    data = vertical_data(classes=classes)
    labels = data.labels[: data.rows + 8].clone()
    labels[data.rows + validation :] = labels[0]
    data = replace(data, labels=labels, parts=Parts(data.rows, validation, 8 - validation))
    with pytest.raises(DataError, match=said):
        build(config(model={"metric": metric}, schedule={"batch_size": 4}), data)


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({}, ""),
        ({"patience": 3}, ""),  # log loss is defined on one class
        ({"patience": 3, "select": "auc"}, r"VFL-7152.*stop\.select.*4.*validation"),
        ({"metric": 0.9}, r"VFL-7152.*4.*validation"),
    ],
)
def test_validation_rows_of_one_class_are_refused_only_where_they_decide(stop, said):
    data = vertical_data(classes=2)
    labels = data.labels.clone()
    labels[data.rows : data.rows + 4] = 0
    made = config(data={"validation_fraction": 0.2}, schedule={"batch_size": 4}, stop={"updates": 20, **stop})
    data = replace(data, labels=labels, parts=Parts(data.rows, 4, data.parts.test - 4))
    if said:
        with pytest.raises(DataError, match=said):
            build(made, data)
        return
    run = build(made, data)
    end = run.train()[-1]
    assert (end.metric, end.metrics["auc"], end.metrics["average_precision"]) == (None, None, None)
    assert end.metrics["log_loss"] > 0
    assert run.evaluator.test()["auc"] is not None


def test_data_that_is_not_there_is_said_before_training():
    with pytest.raises(DataError, match=r"VFL-2181.*MNIST"):
        build(config(data={"name": "mnist", "folder": "nowhere"}))


# --- objects ---


def test_the_configs_own_data_is_loaded_and_split():
    run = build(config(data={"name": "iris"}, partition={"clients": 4}))
    assert [tuple(party.features[run.data.train].shape) for party in run.data.parties] == [(112, 1)] * 4
    assert run.data.labels.tolist() == load(run.config.data).labels[run.data.record_numbers].tolist()
    assert isinstance(run.runtime, Simulator)


def test_a_seed_gives_the_models_and_leaves_torchs_generator_alone():
    torch.manual_seed(99)
    before = torch.get_rng_state()
    one, again, other = (run_of(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(parameters(one), parameters(again))
    assert not same(parameters(one), parameters(other))


def test_threads_are_set_for_the_run_and_put_back():
    def threads():
        products = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        return torch.get_num_threads(), products

    seen, before = [], threads()
    run = build(config(threads=2, stop={"updates": 3}, schedule={"batch_size": 4}), vertical_data())
    run.train(lambda point: seen.append(threads()))
    assert before[1]  # the threads of NumPy's BLAS
    assert {count for torchs, numpys in seen for count in (torchs, *numpys)} == {2}
    assert threads() == before


def test_schedules_are_common_under_sync_and_each_clients_own_otherwise():
    def first(name, index, **schedule):
        settings = config(rule={"name": name}, schedule={"batch_size": 10, "refresh": "none", **schedule})
        return make_schedule(settings, 20, index).batch(0).tolist()

    assert first("sync", 0) == first("sync", 1) == first("centralised", 0)
    assert first("async", 0) != first("async", 1)
    assert first("async", 0) != first("async", 0, seed="private")


@pytest.mark.parametrize(
    ("text", "rule", "kind"),
    [
        ("none", "async", NoRefresh),
        ("all", "async", RefreshAll),
        ("lookahead", "t-sync", Lookahead),
        ("random:5", "async", RandomRefresh),
        ("all", "sync", NoRefresh),
    ],
)
def test_refresh_policies_by_name(text, rule, kind):
    settings = config(schedule={"refresh": text}, rule={"name": rule})
    assert isinstance(
        make_refresh(settings, 0, [make_schedule(settings, 20, index) for index in (0, 1)]), kind
    )


def test_random_refreshes_differ_between_clients():
    settings = config(schedule={"refresh": "random:10"})
    schedules = [make_schedule(settings, 40, index) for index in range(3)]
    drawn = [make_refresh(settings, index, schedules).rows([0, 0, 0]).tolist() for index in (0, 1, 1)]
    assert drawn[1] == drawn[2] != drawn[0]


def test_what_the_head_sees_decides_the_table():
    summed = run_of(model={"head": "linear", "width": 5}).runtime.server.table
    joined = run_of(model={"head": "linear", "width": 5, "combine": "concat"}).runtime.server.table
    assert summed.sums.shape == (20, 5)
    assert joined.sums is None
    assert joined.widths == (5, 5)


def test_the_bound_is_there_only_when_asked_for():
    assert run_of().runtime.server.bound is None
    bound = run_of(rule={"delay_bound": 4, "when_unanswered": "skip"}).runtime.server.bound
    assert (bound.limit, bound.policy) == (4, "skip")


def test_a_secure_sum_needs_three_clients():
    with pytest.raises(ConfigError, match=r"VFL-5103.*3.*2"):
        run_of(vertical_data(clients=2), rule={"name": "sync"}, privacy={"secure_sum": True})


# --- weights ---


@pytest.mark.parametrize("secure_sum", [False, True])
def test_class_weights_train_the_same_under_sync_as_in_one_place(secure_sum):
    clients = 3 if secure_sum else 2
    data, weights = vertical_data(classes=2, clients=clients), {"1": 4.0}
    ends = []
    for rule, own in (("sync", weights), ("centralised", weights), ("sync", {"1": 1.0})):
        privacy = {"secure_sum": True} if secure_sum and rule == "sync" else {}
        run = run_of(data, rule={"name": rule}, model={"class_weight": own}, privacy=privacy)
        run.train()
        ends.append(torch.cat([parameter.flatten() for parameter in parameters(run)]))
    assert torch.allclose(ends[0], ends[1], atol=1e-4)
    assert not torch.allclose(ends[0], ends[2], atol=1e-2)


def test_balanced_weights_come_from_the_labels_that_were_drawn():
    """The true class shares would leak information about the labels that epsilon does not account for."""
    data = replace(vertical_data(rows=400, classes=2), labels=(torch.arange(600) % 400 < 8).long())
    plan = make_plan(config(labels={"epsilon": 0.1}, model={"class_weight": "balanced"}), data)
    assert plan.weights.max() == 25  # 400 / (2 * 8): by the true labels
    drawn = with_drawn_labels(plan)
    labels = drawn.data.labels[:400].long()
    expected = 0.5 / (torch.bincount(labels) / 400)[labels]
    assert drawn.weights == pytest.approx(expected.numpy())
    assert abs(drawn.undo.shifts[0]) < 1 < abs(plan.undo.shifts[0]), "evaluations undo the drawn ones"
    assert drawn.weights.max() < 2


def test_weights_of_unknown_classes_are_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match=r"VFL-3052.*0, 1, 2.*'maybe'"):
        run_of(model={"class_weight": {"maybe": 2.0}})


@pytest.mark.parametrize("rule", ["async", "sync", "centralised"])
def test_an_averaging_run_trains_the_same_and_ends_with_averages(rule):
    sections = {"rule": {"name": rule}, "stop": {"updates": 20}, "evaluation": {"every": 20}}
    sections |= {"schedule": {"batch_size": 5}}
    plain, averaging = (
        build(config(**sections, optimiser={"average": average}), vertical_data(classes=2))
        for average in (False, True)
    )
    before = parameters(averaging)
    points = [run.train() for run in (plain, averaging)]
    assert points[0][-1].train_loss == pytest.approx(points[1][-1].train_loss)
    assert points[0][-1].metrics["log_loss"] != points[1][-1].metrics["log_loss"]
    ends, means = parameters(plain), parameters(averaging)
    assert not any(map(torch.equal, means, ends))
    assert not any(map(torch.equal, means, before))
