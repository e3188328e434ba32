"""The messages between clients and server. They are immutable and check themselves when created.

A message checks its own shapes, types and ranges. The receiver checks what depends on the state of the run,
such as the number of rows or the next activation. No message type can carry raw features or model parameters.

| client sends | server sends |
|---|---|
| `Join`; `Leave` (from the runtime, when a connection ends) | `Welcome`, then the answers still owed |
| `Upload`: embeddings of the minibatch of one activation | `Gradient` or `Skipped` |
| `Query`: ask for the gradient of an earlier upload (query-first order) | `Gradient` or `Skipped` |
| `Refresh`: embeddings of other rows, or the answer to a `Request` | |
| `Decline`: refuse a `Request` | `Request`: ask for fresh embeddings of these rows |
| `Refresh` or `Decline`, as for a `Request` | `Evaluate`: ask for embeddings of these held-out rows |
| `Finished`: no more uploads will follow | |
| `LedgerMark`: a mark that the next `Welcome` returns, to detect an outdated privacy ledger | |
| `Offer`: a fresh key for a key epoch | `Rekey`: a new epoch begins; `Keys`: the keys of all clients |
| `MaskedUpload`, `MaskedRefresh`: masked scores, readable only in the sum over all clients | |
| | `Durable`: how many uploads of this client a checkpoint holds |
| | `Refused`: a message broke a rule; `Stop`: the run is over |
"""

from vafl.protocol.messages.checks import (
    EVERYTHING,
    LARGEST_OFFER,
    LONGEST_GROUP,
    MARK_BYTES,
    made_here,
    require_growth,
)
from vafl.protocol.messages.joining import Durable, Join, Leave, LedgerMark, Refused, Stop, Welcome
from vafl.protocol.messages.masking import Keys, MaskedRefresh, MaskedUpload, Offer, Rekey
from vafl.protocol.messages.training import (
    Decline,
    Evaluate,
    Finished,
    Gradient,
    Query,
    Refresh,
    Request,
    Skipped,
    Upload,
)

MaskingMessage = Offer | MaskedUpload | MaskedRefresh
ClientMessage = Join | Leave | LedgerMark | Upload | Refresh | Query | Decline | Finished | MaskingMessage
ServerMessage = Welcome | Gradient | Skipped | Request | Evaluate | Rekey | Keys | Durable | Stop | Refused

__all__ = ["LARGEST_OFFER", "MARK_BYTES", "made_here", "require_growth"]
__all__ += ["ClientMessage", "Durable", "Join", "Leave", "Refused", "ServerMessage", "Stop", "Welcome"]
__all__ += ["EVERYTHING", "LONGEST_GROUP", "LedgerMark"]
__all__ += ["Decline", "Evaluate", "Finished", "Gradient", "Query", "Refresh", "Request", "Skipped", "Upload"]
__all__ += ["Keys", "MaskedRefresh", "MaskedUpload", "MaskingMessage", "Offer", "Rekey"]
