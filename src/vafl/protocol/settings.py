"""Settings of the protocol: when the server steps, and with which optimiser the parties step.

Every command reads the whole configuration. So this module imports torch only if the settings name one of its
classes.
"""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vafl.errors import ConfigError
from vafl.protocol.stepsizes import SCHEDULES, StepSize, constant, cosine
from vafl.scope import Scope, declared, setting

LARGEST_COUNT = 2**62  # the largest number of uploads or steps; counters are 64-bit integers on wire and disk
_WARM_UP = 300  # the cosine schedule warms up for at most this many iterations
LARGEST_WINDOW = 64  # the most uploads a client may have in flight: bounds the server's memory per client
RuleName = Literal["async", "t-sync", "sync", "centralised"]
Order = Literal["upload-first", "query-first"]
Unanswered = Literal["wait", "skip", "use"]


@dataclass(frozen=True)
class RuleSettings:
    """When the server steps.

    Attributes:
        name: `async`, `t-sync`, `sync`, or `centralised` (all columns in one place, without noise, as an
            upper bound).
        t: for `t-sync`, how many different clients a step waits for.
        delay_bound: D. Before a step uses an embedding older than D iterations, the server asks its client
            for a fresh one. 0 means no bound.
        when_unanswered: what to do if that client cannot answer: `wait` for it, `skip` the upload that needs
            the embedding, or `use` the stale embedding and report it.
        order: `upload-first` is Algorithm 1 as written. `query-first` is its footnote: the client asks for
            the gradient of its last upload, updates its model, then picks and uploads the next batch.
        start: `zeros` stand for embeddings that were never uploaded; with `upload`, each client first uploads
            all rows.
        lead: how many times as many uploads as the slowest client that is present another client may make.
            Its next upload then waits. So a run that is planned in epochs does not end before slow clients
            are trained. Each client may make one epoch of uploads first. 0 sets no limit, as in the paper.
        window: how many uploads a client may have in flight. More than 1 hides the latency of the network.
            Gradients that are missing from the client's model count as delay. 0 chooses 2 over a network, and
            1 in a simulation, with injected delays, under sync and in query-first order.
        local_steps: Q, how many steps the client makes on one answer, with the same gradient.
    """

    name: RuleName = "async"
    t: int = 2
    delay_bound: int = 0
    when_unanswered: Unanswered = "wait"
    order: Order = "upload-first"
    start: Literal["zeros", "upload"] = "zeros"
    lead: float = 0.0
    window: int = 0
    local_steps: int = setting(1, scope=Scope.PARTY)

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
        if self.lead and not 1 <= self.lead < math.inf:
            raise ConfigError(
                "VFL-4204", f"rule.lead must be at least 1, or 0 for no limit. Found {self.lead}."
            )
        if not 0 <= self.window <= LARGEST_WINDOW:
            raise ConfigError(
                "VFL-4193",
                f"rule.window must be 1 to {LARGEST_WINDOW}, or 0 for automatic. Found {self.window}.",
            )
        if self.window > 1 and not self._may_pipeline:
            raise ConfigError(
                "VFL-4194",
                f'a rule.window above 1 needs rule.order = "upload-first" and a rule other than sync. Found '
                f'window {self.window}, order "{self.order}", rule "{self.name}". Set rule.window to 1.',
            )
        if self.local_steps < 1:
            raise ConfigError("VFL-4195", f"rule.local_steps must be 1 or more. Found {self.local_steps}.")

    @property
    def _may_pipeline(self) -> bool:
        return self.order == "upload-first" and self.name != "sync"

    def pipelined(self) -> "RuleSettings":
        """Return settings whose automatic window is 2 if the rule allows it, otherwise 1."""
        return replace(self, window=self.window or (2 if self._may_pipeline else 1))

    def check_clients(self, clients: int) -> None:
        """Raise ConfigError if the rule needs more clients than there are."""
        if self.name == "t-sync" and self.t > clients:
            raise ConfigError(
                "VFL-4196",
                f"rule.t must be at most the number of clients, {clients}. Found {self.t}. "
                f"Set rule.t to {clients} or less. t = {clients} waits for all clients.",
            )


@dataclass(frozen=True)
class OptimiserSettings:
    """The optimiser and step sizes of a party.

    The schedule is shared, because step sizes fall with the server's updates. All else may differ by party.

    Attributes:
        name: `sgd`, or a class of torch.optim (`Adam`, `AdamW`, ...).
        step_size: eta_m, the clients' step size. Schedules from the paper replace it.
        server_step_size: eta_0, the head's step size; 0 means the same as `step_size`. With a schedule from
            the paper, the head's step size is the schedule's times server_step_size / step_size.
        schedule: `constant`; `cosine`, which warms up and falls to 0 at the last planned update; or a
            schedule from the paper, in vafl.protocol.stepsizes.
        constants: the constants of the schedule, with the paper's names. For `cosine`, vafl sets K to the
            last planned update.
        options: more arguments for the optimiser, e.g. { momentum = 0.9 }.
        l2: the coefficient of the clients' regulariser r(theta_m) = l2/2 |theta_m|^2.
        average: whether every party evaluates and keeps the average of its model over the recent steps,
            instead of the model after the last step. A client that trains with differential privacy does not
            average.
    """

    name: str = "sgd"
    step_size: float = 0.1
    server_step_size: float = setting(0.0, scope=Scope.SERVER)
    schedule: str = setting("constant", scope=Scope.TRAINING)
    constants: dict[str, Any] = field(default_factory=dict, metadata=declared(scope=Scope.TRAINING))
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0
    average: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.step_size < math.inf:
            raise ConfigError(
                "VFL-4197", f"optimiser.step_size must be a positive number. Found {self.step_size}."
            )
        if not 0 <= self.server_step_size < math.inf:
            raise ConfigError(
                "VFL-4198",
                "optimiser.server_step_size must be a positive number, or 0 to use step_size. "
                f"Found {self.server_step_size}.",
            )
        if not 0 <= self.l2 < math.inf:
            raise ConfigError("VFL-4199", f"optimiser.l2 must be 0 or more. Found {self.l2}.")
        self.step_sizes()
        self._check_optimiser()

    def _check_optimiser(self) -> None:
        """Raise ConfigError for options that the optimiser does not accept, before a run starts."""
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
        """Return whether this is SGD with or without momentum, which does not use torch.optim."""
        return self.name == "sgd" and self.options.keys() <= {"momentum"}

    @property
    def momentum(self) -> float:
        """Return the momentum of plain SGD; 0 for other optimisers."""
        momentum: float = self.options.get("momentum", 0.0) if self.is_plain else 0.0
        return momentum

    @property
    def decay(self) -> float:
        """Return the weight decay of SGD, which regularises every party; 0 for other optimisers."""
        decay: float = self.options.get("weight_decay", 0.0) if self.name.lower() == "sgd" else 0.0
        return decay

    def own_step_size(self, *, server: bool = False) -> float:
        """Return the step size of the head (`server`) or of the clients."""
        return self.server_step_size if server and self.server_step_size else self.step_size

    def step_sizes(self, *, server: bool = False) -> StepSize:
        """Return the step size as a function of the global iteration.

        Raises:
            ConfigError: the schedule is unknown, or does not accept the constants.
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
                "Set them in [optimiser.constants].",
            ) from None
        ratio = self.own_step_size(server=server) / self.step_size
        return lambda iteration: ratio * scheduled(iteration)

    def _cosine(self, step_size: float) -> StepSize:
        if self.constants.keys() - {"K"}:
            raise ConfigError(
                "VFL-4203",
                'optimiser.schedule "cosine" takes only the constant K, the last planned update. Found '
                f"{', '.join(self.constants)}.",
            )
        last = self.constants.get("K", 1)
        return cosine(step_size, last, max(1, min(_WARM_UP, last // 10)))

    def planned(self, updates: int) -> "OptimiserSettings":
        """Return settings for this number of updates, which the cosine schedule needs."""
        if self.schedule != "cosine" or "K" in self.constants:
            return self
        return replace(self, constants={"K": updates})
