"""Every exception vafl raises on purpose. Nothing else lives here.

    VaflError
    ├── ConfigError          a setting is wrong                              exit code 2
    ├── DataError            a file, a table or a label is wrong             exit code 3
    ├── RunError             a run cannot go on                              exit code 4
    │   ├── BudgetExhausted    a record's privacy budget does not allow it
    │   ├── Diverged           the loss is no longer a finite number
    │   └── Stalled            nothing can happen any more, and why
    ├── AuditFailed          more leaks than the accountant says          exit code 6
    ├── RunFolderError       a run folder is missing, damaged or taken       exit code 5
    │   └── LedgerError        a privacy ledger is damaged, or not the newest one
    └── RemoteFault          the other party refused us, or broke a rule  exit code 7
        ├── InvalidMessage     a message that was refused; no state changed
        └── Unauthenticated    it has not proved who it is

Every message names the rule that was broken, the value that was found, and the remedy.
"""


class VaflError(Exception):
    """The root: `except VaflError` catches all that vafl raises on purpose."""

    exit_code = 1


class ConfigError(VaflError, ValueError):
    """A setting is unknown, missing or out of range."""

    exit_code = 2


class DataError(VaflError, ValueError):
    """Data cannot be used: missing file, NaN, one class only, overlapping columns."""

    exit_code = 3


class RunError(VaflError, RuntimeError):
    """A run that had begun cannot go on."""

    exit_code = 4


class BudgetExhausted(RunError):
    """A record's privacy budget is spent."""


class Diverged(RunError):
    """The training loss stopped being a finite number."""


class Stalled(RunError):
    """Every party waits for a message that cannot come."""


class AuditFailed(VaflError):
    """An audit proved a leak beyond the claim."""

    exit_code = 6


class RunFolderError(VaflError, OSError):
    """A run folder is missing, damaged, or holds another run."""

    exit_code = 5


class LedgerError(RunFolderError):
    """A privacy ledger was damaged, cut, edited or rolled back, or is not the one used before."""


class RemoteFault(VaflError):
    """The other party refused this one, and why; or it broke the protocol: its fault, not ours."""

    exit_code = 7


class InvalidMessage(RemoteFault, ValueError):
    """A message failed its checks and was dropped before it touched any state."""


class Unauthenticated(RemoteFault):
    """The other party showed no certificate, or none that names it to our satisfaction."""
