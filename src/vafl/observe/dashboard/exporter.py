"""Runs as metrics for Prometheus."""

from collections.abc import Iterable, Iterator, Mapping

from vafl.observe.dashboard.views import View
from vafl.observe.prometheus import Sample, exposition

_FAMILIES = {
    "vafl_run_up": ("gauge", "1 while the run goes on, 0 once it has ended or broke off"),
    "vafl_run_waiting": ("gauge", "1 while the run has made no update for a while"),
    "vafl_run_done_ratio": ("gauge", "How far the run is towards its limits"),
    "vafl_run_seconds": ("gauge", "The run's own clock"),
    "vafl_updates_total": ("counter", "Steps of the head"),
    "vafl_metric": ("gauge", "The last evaluation, every metric by name"),
    "vafl_kept_metric": ("gauge", "The models that the run has kept, every metric by name"),
    "vafl_baseline_metric": ("gauge", "What the run has to beat, every metric by name"),
    "vafl_train_loss": ("gauge", "The mean loss of the minibatches before the last evaluation"),
    "vafl_client_here": ("gauge", "1 while the client is connected"),
    "vafl_client_silent_seconds": ("gauge", "Seconds of silence of a connected client; 0 up to a heartbeat"),
    "vafl_client_uploads_total": ("counter", "Minibatches the client has uploaded"),
    "vafl_client_bytes_total": ("counter", "What the client has sent (up) and received (down)"),
    "vafl_client_alarms": ("gauge", "Alarms about the client that are on now"),
    "vafl_client_delay_mean": ("gauge", "Global iterations by which its embeddings were old when used"),
    "vafl_client_delay_max": ("gauge", "The longest of those delays"),
}


def as_prometheus(views: Iterable[View]) -> str:
    """Return the metrics of every run and its clients as text."""
    return exposition(_FAMILIES, (sample for view in views for sample in _of_run(view)))


def _of_run(view: View) -> Iterator[Sample]:
    run, status = {"run": view.name}, view.status
    yield "vafl_run_up", run, float(view.state in ("running", "waiting"))
    yield "vafl_run_waiting", run, float(view.state == "waiting")
    if status is not None:
        yield "vafl_run_done_ratio", run, status.share
        yield "vafl_run_seconds", run, status.seconds
        yield "vafl_updates_total", run, status.updates
        for client in status.clients:
            own = {**run, "client": client.name}
            yield "vafl_client_here", own, float(not client.gone)
            yield "vafl_client_silent_seconds", own, client.silent
            yield "vafl_client_alarms", own, len(client.alarms)
            yield "vafl_client_uploads_total", own, client.activations
            yield "vafl_client_bytes_total", {**own, "direction": "up"}, client.bytes_up
            yield "vafl_client_bytes_total", {**own, "direction": "down"}, client.bytes_down
            yield "vafl_client_delay_mean", own, client.delay_mean
            yield "vafl_client_delay_max", own, client.delay_max
    if view.points:
        last = view.points[-1]
        yield from _metrics("vafl_metric", {**run, "rows": view.rows}, last.metrics)
        if last.train_loss is not None:
            yield "vafl_train_loss", run, last.train_loss
    for rows, figures in view.kept.items():
        yield from _metrics("vafl_kept_metric", {**run, "rows": rows}, figures)
    for name, by_rows in view.baselines.items():
        for rows, figures in by_rows.items():
            yield from _metrics("vafl_baseline_metric", {**run, "baseline": name, "rows": rows}, figures)


def _metrics(family: str, labels: Mapping[str, str], figures: Mapping[str, float | None]) -> Iterator[Sample]:
    """Yield a sample for each metric that is defined."""
    for name, value in figures.items():
        if value is not None:
            yield family, {**labels, "name": name}, value
