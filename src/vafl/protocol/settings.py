"""What a configuration says of the protocol: when the server acts, and how every party steps.

Every command reads a whole configuration, so nothing here loads torch but where a class of it is named.
"""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vafl.errors import ConfigError
from vafl.protocol.stepsizes import SCHEDULES, StepSize, constant, cosine

LARGEST_COUNT = 2**62  # of uploads or steps; counters travel and are kept as 64-bit numbers
_WARM_UP = 300  # iterations in which step sizes grow, at most
LARGEST_WINDOW = 64  # uploads a client may ever have in flight: bounds what the server keeps for it
RuleName = Literal["async", "t-sync", "sync", "centralised"]
Order = Literal["upload-first", "query-first"]
Unanswered = Literal["wait", "skip", "use"]


@dataclass(frozen=True)
class RuleSettings:
    """When the server acts.

    Attributes:
        name: `async`, `t-sync`, `sync`, or `centralised` (all columns in one place, without
            any noise: the ceiling).
        t: for `t-sync`, how many different clients a step waits for.
        delay_bound: D; before a step uses a cell older than D iterations, the server asks its client
            for a fresh embedding. 0 means no bound.
        when_unanswered: what to do when that client cannot answer: `wait` for it, `skip` the upload
            that needs it, or `use` the stale cell and report it.
        order: `upload-first` is Algorithm 1 as written; `query-first` is its footnote: the client
            asks for the gradient of its last upload, updates, then picks and uploads anew.
        start: cells nobody has uploaded yet count as `zeros`, or each client's first act is a full
            `upload`.
        window: uploads a client may have in flight, so that a long way to the server does not throttle it;
            what its model misses meanwhile counts as delay. 0 is 2 over a network, and 1 in a simulation,
            with delays injected for an experiment, under sync and in query-first order.
        local_steps: Q, the client's steps on one answer (the same gradient, re-applied).
    """

    name: RuleName = "async"
    t: int = 2
    delay_bound: int = 0
    when_unanswered: Unanswered = "wait"
    order: Order = "upload-first"
    start: Literal["zeros", "upload"] = "zeros"
    window: int = 0
    local_steps: int = 1

    def __post_init__(self) -> None:
        if self.t < 1:
            raise ConfigError(
                "VFL-4191", f"rule.t must be 1 or more. Found {self.t}. t = 1 is the async rule."
            )
        if self.delay_bound < 0:
            raise ConfigError(
                "VFL-4192",
                f"rule.delay_bound must be at least 1, or 0 for no bound. Found {self.delay_bound}.",
            )
        if not 0 <= self.window <= LARGEST_WINDOW:
            raise ConfigError(
                "VFL-4193",
                f"rule.window must be 1 to {LARGEST_WINDOW}, or 0 for what suits. Found {self.window}.",
            )
        if self.window > 1 and not self._may_pipeline:
            raise ConfigError(
                "VFL-4194",
                f'rule.window = {self.window} needs order = "upload-first" and a rule other than sync, whose '
                "rounds are one upload each. Set rule.window to 1.",
            )
        if self.local_steps < 1:
            raise ConfigError("VFL-4195", f"rule.local_steps must be 1 or more. Found {self.local_steps}.")

    @property
    def _may_pipeline(self) -> bool:
        return self.order == "upload-first" and self.name != "sync"

    def pipelined(self) -> "RuleSettings":
        """With two uploads in flight, where the rule allows it and no other window is set."""
        return replace(self, window=self.window or (2 if self._may_pipeline else 1))

    def check_clients(self, clients: int) -> None:
        """Raises ConfigError where the rule cannot be followed by so many clients."""
        if self.name == "t-sync" and self.t > clients:
            raise ConfigError(
                "VFL-4196",
                f"rule.t must be at most the number of clients, {clients}. Found {self.t}. "
                f"Set rule.t to {clients} or less; t = {clients} waits for everyone.",
            )


@dataclass(frozen=True)
class OptimiserSettings:
    """How every party steps.

    Attributes:
        name: `sgd`, or a class of torch.optim (`Adam`, `AdamW`, ...).
        step_size: eta_m, the clients' step size; a schedule takes its place.
        server_step_size: eta_0, the head's; 0 means the same as `step_size`. Under a schedule the head's
            steps are the schedule's times server_step_size / step_size.
        schedule: `constant`; `cosine`, which warms up and falls to 0 at the last planned update; or a
            schedule of vafl.protocol.stepsizes, from the paper.
        constants: the constants that schedule needs, by the paper's names. Of `cosine`, K is the last
            planned update, and vafl sets it.
        options: more arguments for the optimiser, e.g. { momentum = 0.9 }.
        l2: the clients' regulariser r(theta_m) = l2/2 |theta_m|^2.
        average: whether every party evaluates and keeps the average of its model over the recent steps,
            instead of the model after the last step. A client that trains with differential privacy does not
            average.
    """

    name: str = "sgd"
    step_size: float = 0.1
    server_step_size: float = 0.0
    schedule: str = "constant"
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0
    average: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.step_size < math.inf:
            raise ConfigError("VFL-4197", f"optimiser.step_size must be above 0. Found {self.step_size}.")
        if not 0 <= self.server_step_size < math.inf:
            raise ConfigError(
                "VFL-4198",
                "optimiser.server_step_size must be above 0, or 0 to take step_size. "
                f"Found {self.server_step_size}.",
            )
        if not 0 <= self.l2 < math.inf:
            raise ConfigError("VFL-4199", f"optimiser.l2 must be 0 or more. Found {self.l2}.")
        self.step_sizes()
        self._check_optimiser()

    def _check_optimiser(self) -> None:
        """A wrong option fails here, not in the middle of a run."""
        if self.is_plain:
            momentum = self.momentum
            if type(momentum) not in (int, float) or not 0 <= momentum < math.inf:
                raise ConfigError(
                    "VFL-4200",
                    f"momentum in optimiser.options must be a number, 0 or more. Found {momentum!r}.",
                )
        else:
            from vafl.protocol.optimisers import try_once  # noqa: PLC0415 - only torch knows its optimisers

            try_once(self)

    @property
    def is_plain(self) -> bool:
        """SGD, with momentum or without, needs nothing of torch.optim."""
        return self.name == "sgd" and self.options.keys() <= {"momentum"}

    @property
    def momentum(self) -> float:
        """Of plain SGD."""
        momentum: float = self.options.get("momentum", 0.0) if self.is_plain else 0.0
        return momentum

    @property
    def decay(self) -> float:
        """SGD's weight decay, which regularises every party's parameters; 0 for any other class."""
        decay: float = self.options.get("weight_decay", 0.0) if self.name.lower() == "sgd" else 0.0
        return decay

    def own_step_size(self, *, server: bool = False) -> float:
        """The head's, or the clients'."""
        return self.server_step_size if server and self.server_step_size else self.step_size

    def step_sizes(self, *, server: bool = False) -> StepSize:
        """The step size as a function of the global iteration.

        Raises:
            ConfigError: the schedule is unknown, or its constants are not those it takes.
        """
        if self.schedule == "constant":
            return constant(self.own_step_size(server=server))
        if self.schedule == "cosine":
            return self._cosine(self.own_step_size(server=server))
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                "VFL-4201",
                f"optimiser.schedule must be constant, cosine or one of {', '.join(SCHEDULES)}. "
                f'Found "{self.schedule}".',
            )
        make = SCHEDULES[self.schedule]
        try:
            inspect.signature(make).bind(**self.constants)
            scheduled = make(**self.constants)
        except TypeError as error:
            needs = ", ".join(inspect.signature(make).parameters)
            raise ConfigError(
                "VFL-4202",
                f'optimiser.schedule "{self.schedule}" takes the constants {needs}: {error}. '
                "Put them into [optimiser.constants].",
            ) from None
        ratio = self.own_step_size(server=server) / self.step_size
        return lambda iteration: ratio * scheduled(iteration)

    def _cosine(self, step_size: float) -> StepSize:
        if self.constants.keys() - {"K"}:
            raise ConfigError(
                "VFL-4203",
                'optimiser.schedule "cosine" takes no constant but K, the last planned update. Found '
                f"{', '.join(self.constants)}.",
            )
        last = self.constants.get("K", 1)
        return cosine(step_size, last, max(1, min(_WARM_UP, last // 10)))

    def planned(self, updates: int) -> "OptimiserSettings":
        """With step sizes for so many updates, where the schedule needs to know."""
        if self.schedule != "cosine" or "K" in self.constants:
            return self
        return replace(self, constants={"K": updates})
