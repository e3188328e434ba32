"""Which settings the parties must agree on, which a model keeps, and which may change when a run resumes.

Nothing is listed here: `vafl.scope` declares it beside each setting.
"""

import hashlib
import json
from typing import Any

from vafl.config.schema import Config
from vafl.scope import Scope, declarations


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be the same at all parties, and that a model keeps."""
    shared = _select(config, Scope.MODEL)
    shared["privacy"]["mode"] = config.privacy.kind
    return shared


def training_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be the same at all parties while they train, without the network's."""
    chosen = _select(config, Scope.TRAINING)
    del chosen["network"]
    return chosen


def agreed_digest(config: Config) -> str:
    """Return a short digest of everything that the parties must agree on before they train."""
    agreed = shared_settings(config) | _select(config, Scope.TRAINING)
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def chosen_by_party(section: str) -> tuple[str, ...]:
    """Return the keys of a section that each party chooses, before and after the training."""
    return tuple(
        key
        for name, key, declared in declarations(Config)
        if name == section and declared.scope != Scope.MODEL
    )


def sections_of(scope: Scope) -> tuple[str, ...]:
    """Return the sections that have a setting of this scope."""
    found = dict.fromkeys(name for name, _, declared in declarations(Config) if declared.scope == scope)
    return tuple(name for name in found if name)


def changeable() -> tuple[str, ...]:
    """Return the dotted names of the settings that a resumed run may change."""
    return tuple(f"{name}.{key}" for name, key, declared in declarations(Config) if declared.may_change)


def _select(config: Config, scope: Scope) -> dict[str, Any]:
    document, chosen = config.document(), dict[str, Any]()
    for name, key, declared in declarations(Config):
        if declared.scope != scope:
            continue
        if name:
            chosen.setdefault(name, {})[key] = document[name][key]
        else:
            chosen[key] = document[key]
    return chosen
