"""Model folders with an edited manifest and matching digests."""

import hashlib
import json
import tomllib

import tomli_w

from vafl.models.store import MANIFEST


def read_document(folder):
    return tomllib.loads((folder / MANIFEST).read_text())


def write_document(folder, document):
    """Write the manifest with a matching digest, as an attacker would."""
    entries = {key: value for key, value in document.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()
    (folder / MANIFEST).write_text(tomli_w.dumps({"digest": digest, **entries}))
