"""Everything the parties say to each other: frozen, and checked when made.

What a message says about itself (shapes, types, signs) is checked here; what only the receiver can
know (how many rows there are, whose turn it is) is checked by the receiver. No message carries raw
features or model parameters, and none of these types could.

| client says | server says |
|---|---|
| `Join`; `Leave` (said by the runtime when a client vanished) | `Welcome`, then what is still owed |
| `Upload`: embeddings of a minibatch, at one activation | `Gradient` or `Skipped` |
| `Query`: the gradient for an earlier upload (query-first order) | `Gradient` or `Skipped` |
| `Refresh`: embeddings of other rows, or of the rows asked for | |
| `Decline`: cannot give the rows asked for | `Request`: send fresh embeddings of these rows |
| `Refresh` or `Decline`, as for a `Request` | `Evaluate`: send embeddings of these held-out rows |
| `Finished`: makes no more uploads | |
| `LedgerMark`: what the next `Welcome` must show, to prove that the client's ledger is the newest | |
| `Offer`: a fresh key for an epoch of masks | `Rekey`: a new epoch begins; `Keys`: everybody's keys |
| `MaskedUpload`, `MaskedRefresh`: as above, readable only in the sum over all clients | |
| | `Durable`: what a checkpoint now holds of this client |
| | `Refused`: a message broke a rule; `Stop`: the run is over |
"""

from vafl.protocol.messages.checks import (
    EVERYTHING,
    HEADER_BYTES,
    LARGEST_OFFER,
    LONGEST_GROUP,
    MARK_BYTES,
    ROW_BYTES,
    Words,
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

__all__ = ["HEADER_BYTES", "LARGEST_OFFER", "MARK_BYTES", "ROW_BYTES", "Words", "made_here", "require_growth"]
__all__ += ["ClientMessage", "Durable", "Join", "Leave", "Refused", "ServerMessage", "Stop", "Welcome"]
__all__ += ["EVERYTHING", "LONGEST_GROUP", "LedgerMark"]
__all__ += ["Decline", "Evaluate", "Finished", "Gradient", "Query", "Refresh", "Request", "Skipped", "Upload"]
__all__ += ["Keys", "MaskedRefresh", "MaskedUpload", "MaskingMessage", "Offer", "Rekey"]
