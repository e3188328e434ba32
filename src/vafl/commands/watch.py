"""`vafl watch`: show runs in a browser while they train, and export metrics to a monitoring system."""

import argparse
import logging
import signal
from pathlib import Path
from threading import Event, Thread

from rich.console import Console

from vafl.commands.configured import log_to_stderr
from vafl.errors import ConfigError
from vafl.observe.dashboard.server import Dashboard
from vafl.observe.dashboard.views import find_runs
from vafl.transport.identity import HttpAddress

log = logging.getLogger("vafl.watch")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl watch`."""
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="run folders, or folders that contain run folders",
    )
    parser.add_argument(
        "--http",
        default="127.0.0.1:8090",
        metavar="HOST:PORT",
        help="the address of the dashboard (%(default)s)",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Serve the dashboard until SIGINT or SIGTERM."""
    log_to_stderr()
    http = HttpAddress.of(options.http)
    if not http.is_loopback:
        log.warning(
            "EVERYONE who can reach %s can see these runs, unencrypted and without a password. Bind to "
            "127.0.0.1 and use an SSH tunnel, or put a proxy with TLS and authentication in front of it.",
            options.http,
        )
    count = len(find_runs(options.folders))
    try:
        dashboard = Dashboard(options.folders, http)
    except OSError as error:
        raise ConfigError(
            "VFL-9154",
            f"--http: cannot listen on {http.url(http.port)}: {error.strerror}. Choose an address of this "
            "machine and a free port.",
        ) from error
    stopped = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with dashboard:
        runs = "no run yet" if not count else "1 run" if count == 1 else f"{count:,} runs"
        console.print(f"{runs}: {http.url(dashboard.port)}; Ctrl-C stops the dashboard, not the runs")
        Thread(target=dashboard.serve_forever, daemon=True).start()
        stopped.wait()
        dashboard.shutdown()
