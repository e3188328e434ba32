"""Export runs as metrics for Prometheus."""

from collections.abc import Iterable, Iterator, Mapping

from vafl.observe.dashboard.views import View
from vafl.observe.prometheus import Sample, exposition

_FAMILIES = {
    "vafl_run_up": ("gauge", "1 while the run is active, 0 after it has ended or crashed"),
    "vafl_run_waiting": ("gauge", "1 while the run waits and makes no updates"),
    "vafl_run_done_ratio": ("gauge", "Completed share of the run, 0 to 1"),
    "vafl_run_seconds": ("gauge", "The run's clock, in seconds"),
    "vafl_updates_total": ("counter", "Steps of the head"),
    "vafl_metric": ("gauge", "Metrics of the last evaluation, by name"),
    "vafl_kept_metric": ("gauge", "Metrics of the kept models, by name"),
    "vafl_baseline_metric": ("gauge", "Metrics of the baselines, by name"),
    "vafl_train_loss": ("gauge", "The mean loss of the minibatches before the last evaluation"),
    "vafl_client_here": ("gauge", "1 while the client is connected"),
    "vafl_client_silent_seconds": (
        "gauge",
        "Seconds since the last message of a connected client; 0 up to a heartbeat",
    ),
    "vafl_client_uploads_total": ("counter", "Minibatches that the client has uploaded"),
    "vafl_client_bytes_total": ("counter", "Bytes that the client has sent (up) and received (down)"),
    "vafl_client_alarms": ("gauge", "Active alarms about the client"),
    "vafl_client_delay_mean": (
        "gauge",
        "Mean staleness of the client's embeddings when used, in server steps",
    ),
    "vafl_client_delay_max": (
        "gauge",
        "Largest staleness of the client's embeddings when used, in server steps",
    ),
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
            labels = {**run, "client": client.name}
            yield "vafl_client_here", labels, float(not client.gone)
            yield "vafl_client_silent_seconds", labels, client.silent
            yield "vafl_client_alarms", labels, len(client.alarms)
            yield "vafl_client_uploads_total", labels, client.activations
            yield "vafl_client_bytes_total", {**labels, "direction": "up"}, client.bytes_up
            yield "vafl_client_bytes_total", {**labels, "direction": "down"}, client.bytes_down
            yield "vafl_client_delay_mean", labels, client.delay_mean
            yield "vafl_client_delay_max", labels, client.delay_max
    if view.evaluations:
        last = view.evaluations[-1]
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
