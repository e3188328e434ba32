"""The same views as numbers for a monitoring system, in Prometheus' text format."""

from collections.abc import Iterable, Iterator

from vafl.observe.dashboard.views import View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_KINDS = {  # by name, its kind and what it is
    "vafl_run_up": ("gauge", "1 while the run goes on, 0 once it has ended or broke off"),
    "vafl_run_waiting": ("gauge", "1 while the run has made no update for a while"),
    "vafl_run_done_ratio": ("gauge", "How far the run is towards its limits"),
    "vafl_run_seconds": ("gauge", "The run's own clock"),
    "vafl_updates_total": ("counter", "Steps of the head"),
    "vafl_metric": ("gauge", "The last evaluation"),
    "vafl_train_loss": ("gauge", "The mean loss of the minibatches before the last evaluation"),
    "vafl_client_here": ("gauge", "1 while the client is connected"),
    "vafl_client_uploads_total": ("counter", "Minibatches the client has uploaded"),
    "vafl_client_bytes_total": ("counter", "What the client has sent (up) and received (down)"),
    "vafl_client_alarms": ("gauge", "Alarms about the client that are on now"),
    "vafl_client_delay_mean": ("gauge", "Global iterations by which its embeddings were old when used"),
    "vafl_client_delay_max": ("gauge", "The longest of those delays"),
}
Sample = tuple[str, dict[str, str], float]


def as_prometheus(views: Iterable[View]) -> str:
    """Each metric once, with what it is, then its value for every run and client."""
    samples = [sample for view in views for sample in _of_run(view)]
    lines = []
    for name, (kind, about) in _KINDS.items():
        own = [sample for sample in samples if sample[0] == name]
        if own:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *map(_line, own)]
    return "\n".join([*lines, ""])


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
            yield "vafl_client_alarms", own, len(client.alarms)
            yield "vafl_client_uploads_total", own, client.activations
            yield "vafl_client_bytes_total", {**own, "direction": "up"}, client.bytes_up
            yield "vafl_client_bytes_total", {**own, "direction": "down"}, client.bytes_down
            yield "vafl_client_delay_mean", own, client.delay_mean
            yield "vafl_client_delay_max", own, client.delay_max
    yield from _of_last_point(view)


def _of_last_point(view: View) -> Iterator[Sample]:
    last = view.points[-1] if view.points else None
    if last is not None:
        name = view.status.metric if view.status else "metric"
        yield "vafl_metric", {"run": view.name, "metric": name}, last.metric
        if last.train_loss is not None:
            yield "vafl_train_loss", {"run": view.name}, last.train_loss


def _line(sample: Sample) -> str:
    name, labels, value = sample
    told = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value!r}"
