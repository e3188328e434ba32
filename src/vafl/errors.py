"""Every exception vafl raises on purpose. Nothing else lives here.

    VaflError
    ├── ConfigError          a setting is wrong                              exit code 2
    ├── DataError            a file, a table or a label is wrong             exit code 3
    ├── RunError             a run cannot go on                              exit code 4
    │   ├── BudgetExhausted    a record's privacy budget does not allow it
    │   ├── Diverged           the loss is no longer a finite number
    │   └── Stalled            every party waits for another one
    ├── AuditFailed          an audit measured more leakage than claimed     exit code 6
    ├── RunFolderError       a run folder is missing, damaged or taken       exit code 5
    │   └── LedgerError        a privacy ledger is damaged or outdated
    └── RemoteFault          the other party refused us, or broke a rule     exit code 7
        ├── InvalidMessage     a message failed its checks; no state changed
        └── Unauthenticated    the other party has not proved its identity

Every message names the rule that was broken, the value that was found, and the remedy. Each place that raises
has its own code, such as VFL-1203. Codes are stable: programs and tests match them, and docs/errors.md lists
them. The first digit is the package:

    1 config   2 data   3 models   4 protocol   5 privacy   6 transport, simulation
    7 run      8 observe, estimator, audit      9 commands
"""


class VaflError(Exception):
    """The base class: `except VaflError` catches every error that vafl raises on purpose.

    Attributes:
        code: the stable code of the `raise` statement, such as "VFL-1203".
        message: the text without the code.
    """

    exit_code = 1

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __format__(self, spec: str) -> str:
        """Return the text without the code, so that f"...: {error}" can be the message of another error."""
        return format(self.message, spec)


class ConfigError(VaflError, ValueError):
    """A setting is unknown, missing or out of range."""

    exit_code = 2


class DataError(VaflError, ValueError):
    """Data cannot be used, because of a missing file, NaN, a single class or overlapping columns."""

    exit_code = 3


class RunError(VaflError, RuntimeError):
    """A run has started and cannot go on."""

    exit_code = 4


class BudgetExhausted(RunError):
    """A record's privacy budget is spent."""


class Diverged(RunError):
    """The training loss stopped being a finite number."""


class Stalled(RunError):
    """Every party waits for a message that will not arrive."""


class AuditFailed(VaflError):
    """An audit measured more leakage than the privacy guarantee allows."""

    exit_code = 6


class RunFolderError(VaflError, OSError):
    """A run folder is missing or damaged, or belongs to another run."""

    exit_code = 5


class LedgerError(RunFolderError):
    """A privacy ledger was damaged, truncated, edited or rolled back, or is not the one used before."""


class RemoteFault(VaflError):
    """The other party refused this one, or broke the protocol. The fault is not local."""

    exit_code = 7


class InvalidMessage(RemoteFault, ValueError):
    """A message failed its checks and was dropped before it changed any state."""


class Unauthenticated(RemoteFault):
    """The other party has no certificate, or its certificate does not prove the expected name."""
