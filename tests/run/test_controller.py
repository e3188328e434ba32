"""The state machine of a run, without models, clients or time: events in, the next step out."""

from dataclasses import dataclass

import pytest

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.models.metrics import Metrics
from vafl.observe.evaluation import Evaluation
from vafl.run.controller import End, Ending, Phase, RunController, Step

SILENT = End.of(Ending.CLIENTS_SILENT, clients="bank")


@dataclass
class Moment:
    updates: int = 0
    now: float = 0.0


def controller(stop=None, every=10, **settings):
    stop = stop or StopSettings(updates=30)
    evaluation = EvaluationSettings(every=every)
    return RunController(stop, evaluation, Metrics.of("binary", 1, select=stop.select), **settings)


def result(auc, loss=0.5, updates=0):
    return Evaluation(0.0, updates, 0, 0, None, auc, {"auc": auc, "log_loss": loss})


def evaluate(run, updates, auc=0.5, loss=0.5):
    """Begin and finish an evaluation; return whether it is the best so far."""
    run.evaluation_begun()
    assert run.next(Moment(updates)) is Step.EVALUATE
    return run.evaluated(Moment(updates), result(auc, loss, updates))


# --- the phases ---


def test_a_run_is_evaluated_trained_tested_and_saved():
    run = controller(has_test_rows=True, checkpoint_every=5)
    assert (run.phase, run.next(Moment(0))) == (Phase.STARTING, Step.EVALUATE)
    evaluate(run, 0)
    assert (run.phase, run.next(Moment(9))) == (Phase.TRAINING, Step.TRAIN)
    assert run.next(Moment(12)) is Step.EVALUATE
    evaluate(run, 12)
    assert [run.next(Moment(updates)) for updates in (12, 19, 20)] == [Step.TRAIN, Step.TRAIN, Step.EVALUATE]
    assert (run.next(Moment(30)), run.phase) == (Step.EVALUATE, Phase.ENDING)
    evaluate(run, 30)
    assert (run.next(Moment(30)), run.phase) == (Step.TEST, Phase.ENDING)
    run.test_begun()
    assert (run.next(Moment(30)), run.phase) == (Step.TEST, Phase.TESTING)
    run.tested()
    assert (run.next(Moment(30)), run.phase) == (Step.SAVE, Phase.SAVING)
    run.saved()
    assert (run.next(Moment(30)), run.phase) == (Step.STOP, Phase.ENDED)
    assert run.end == End.of(Ending.UPDATES, updates=30)


def test_an_evaluation_that_has_not_begun_yet_does_not_keep_a_run_from_ending():
    run = controller()
    assert run.next(Moment(0)) is Step.EVALUATE
    assert run.next(Moment(30)) is Step.EVALUATE
    assert run.phase is Phase.ENDING


def test_an_evaluation_under_way_is_finished_before_a_limit_ends_the_run():
    run = controller(checkpoint_every=5)
    run.evaluation_begun()
    run.interrupt()
    assert (run.next(Moment(30)), run.end) == (Step.EVALUATE, None)
    run.evaluated(Moment(30), result(0.5))
    assert (run.next(Moment(30)), run.end.reason) == (Step.SAVE, Ending.INTERRUPTED)


@pytest.mark.parametrize(("settles", "then"), [(False, Step.STOP), (True, Step.EVALUATE)])
def test_models_that_messages_in_flight_still_change_are_evaluated_again(settles, then):
    run = controller(StopSettings(updates=30, seconds=5.0), settles=settles)
    evaluate(run, 10)
    assert run.next(Moment(10, 5.0)) is then
    assert run.end.reason is Ending.SECONDS


def test_an_evaluation_that_measured_nothing_is_not_tried_again():
    run = controller(has_test_rows=True)
    assert run.next(Moment(30)) is Step.EVALUATE
    run.evaluation_begun()
    assert not run.evaluated(Moment(30), None)
    assert run.next(Moment(30)) is Step.TEST
    assert not run.has_result


def test_a_run_that_was_aborted_has_ended():
    failed, stopped = controller(), controller()
    stopped.interrupt()
    for run in (failed, stopped):
        run.abort()
        assert run.next(Moment(3)) is Step.STOP
    assert [run.end.reason for run in (failed, stopped)] == [Ending.FAILED, Ending.INTERRUPTED]


# --- why a run ends ---


def test_an_interrupt_comes_before_limits_and_limits_before_clients():
    stop, late = StopSettings(updates=30, seconds=5.0), Moment(30, 7.0)
    run = controller(stop)
    run.interrupt()
    run.next(late, SILENT)
    assert run.end.reason is Ending.INTERRUPTED
    for moment, reason in (
        (late, Ending.UPDATES),
        (Moment(3, 7.0), Ending.SECONDS),
        (Moment(3, 1.0), Ending.CLIENTS_SILENT),
    ):
        run = controller(stop)
        run.next(moment, SILENT)
        assert run.end.reason is reason


def test_the_first_reason_stays():
    run = controller(StopSettings(updates=30, metric=0.9))
    run.next(Moment(30))
    run.interrupt()
    evaluate(run, 30, auc=0.95)
    assert run.end.reason is Ending.UPDATES
    assert run.interrupted


def test_an_interrupt_after_the_end_does_not_count():
    run = controller()
    run.saved()
    run.interrupt()
    assert not run.interrupted


def test_only_budgets_that_allow_no_step_are_in_vain():
    spent = End.of(Ending.BUDGETS_SPENT)
    assert spent.is_in_vain(0)
    assert not spent.is_in_vain(1)
    assert not SILENT.is_in_vain(0)


def test_every_reason_has_a_text_with_its_figures_filled_in():
    figures = {"updates": 3, "seconds": 4.2, "metric": "auc", "evaluations": 2, "clients": "bank"}
    texts = [End.of(reason, **figures).text for reason in Ending]
    assert len(set(texts)) == len(Ending)
    assert not any("{" in text for text in texts)


# --- the best evaluation, the target and patience ---


def judged(stop, *evaluations):
    """Feed (auc, log_loss) pairs; return the reasons to end after each, and the places of the best ones."""
    run, reasons, best = controller(stop), [], []
    for place, (auc, loss) in enumerate(evaluations):
        if evaluate(run, place, auc, loss):
            best.append(place)
        reasons.append(run.end)
    return [end and (end.reason, end.text.split()[0]) for end in reasons], best


def test_the_model_is_selected_by_loss_and_not_by_the_headline():
    """On imbalanced labels the first, untrained model may have the best accuracy of all."""
    reasons, best = judged(StopSettings(patience=3), (0.9, 0.7), (0.8, 0.5), (0.7, 0.3), (0.6, 0.4))
    assert (reasons, best) == ([None] * 4, [0, 1, 2])
    by_auc = StopSettings(patience=3, select="auc")
    reasons, best = judged(by_auc, (0.9, 0.7), (0.8, 0.5), (0.7, 0.3), (0.6, 0.4))
    assert best == [0]
    assert reasons == [None] * 3 + [(Ending.NO_IMPROVEMENT, "auc")]


def test_a_target_is_for_the_headline_and_patience_for_the_loss():
    reasons, _ = judged(StopSettings(metric=0.8, patience=2), (0.5, 0.3), (0.6, 0.4), (0.9, 0.5))
    assert reasons == [None, None, (Ending.METRIC_REACHED, "auc")]
    reasons, _ = judged(StopSettings(patience=2), (0.5, 0.3), (0.6, 0.4), (0.9, 0.5))
    assert reasons == [None, None, (Ending.NO_IMPROVEMENT, "log_loss")]


def test_an_evaluation_without_the_metric_is_no_better_and_reaches_nothing():
    reasons, best = judged(StopSettings(metric=0.1, patience=2), (None, None), (None, 0.5), (None, None))
    assert (reasons, best) == ([None] * 3, [1])


def test_evaluations_from_before_a_restart_count_for_patience():
    run = controller(StopSettings(updates=100, patience=2))
    for loss in (0.3, 0.4):
        run.recall(result(0.5, loss))
    assert not evaluate(run, 20, loss=0.5)
    assert run.end.reason is Ending.NO_IMPROVEMENT


# --- checkpoints ---


def test_checkpoints_are_due_by_updates_or_by_uploads_that_made_no_update():
    run = controller(checkpoint_every=10)
    assert [run.is_checkpoint_due(9), run.is_checkpoint_due(10)] == [False, True]
    run.checkpointed(10)
    assert [run.is_checkpoint_due(19, lag=9), run.is_checkpoint_due(12, lag=10)] == [False, True]
    assert not controller().is_checkpoint_due(1000, lag=1000)
