"""A whole audit of one configuration: canaries where something is claimed, attacks on a run of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vafl.audit.attacks import Attack, Eavesdropper, infer_labels, invert_features, replay
from vafl.audit.canaries import Finding, audit_mechanism, audit_model_channel
from vafl.build import build
from vafl.config import Config
from vafl.data.partition import VerticalData
from vafl.plan import make_plan
from vafl.privacy.settings import PrivacySettings

_MOST_ROUNDS = 100


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        silent: why nothing was audited by canaries, if nothing was.
    """

    findings: list[Finding]
    attacks: list[Attack]
    silent: str = ""

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        findings = [{**asdict(finding), "passed": finding.passed} for finding in self.findings]
        return {
            "passed": self.passed,
            "findings": findings,
            "attacks": [asdict(attack) for attack in self.attacks],
            "not_audited": self.silent or None,
        }


def audit(
    config: Config, data: VerticalData | None = None, canaries: int = 1000, noise_scale: float = 1.0
) -> Report:
    """Audits the privacy settings by canaries, and a run of the whole configuration by attacks.

    Args:
        noise_scale: lets the clients add only so much of the noise they claim: a test of the audit itself.
    """
    findings, silent = _canaries(config.privacy, canaries, noise_scale)
    plan = make_plan(config, data)
    run = build(config, data)
    heard = Eavesdropper(run)
    run.train()
    attacks = [invert_features(run, heard)]
    if plan.task.loss != "squared":
        truth = plan.data.train_labels.numpy().astype(np.int64)
        replayed = [] if config.privacy.secure_sum else [replay(heard, truth)]  # nobody is answered alone
        attacks = [*infer_labels(heard, truth), *replayed, *attacks]
    return Report(findings, attacks, silent)


def _canaries(settings: PrivacySettings, canaries: int, noise_scale: float) -> tuple[list[Finding], str]:
    if settings.kind == "none":
        return [], "privacy.mode is none: nothing is claimed"
    if not settings.clip or not settings.noise:
        return [], "without privacy.clip and privacy.noise no claim can be made"
    used = replace(
        settings,
        noise=settings.noise * noise_scale,
        gradient_noise=settings.gradient_noise * noise_scale,
        layers=(),
    )
    rounds = _rounds(settings)
    findings = [_confirmed(lambda: audit_mechanism(settings, used, canaries, rounds))]
    if settings.kind in ("dp_train", "embed_only"):
        findings.append(_confirmed(lambda: audit_model_channel(settings, used, canaries // 2, rounds)))
    return findings, ""


def _rounds(settings: PrivacySettings) -> int:
    """As many as bring mu near 1, where canaries tell most."""
    return max(1, min(_MOST_ROUNDS, round(1 / settings.batch_cost())))


def _confirmed(look: Callable[[], Finding]) -> Finding:
    """A bound that holds 95 times in 100 fails 5 times for an honest client: alarms are looked at twice."""
    finding = look()
    if finding.passed:
        return finding
    again = look()
    return finding if not again.passed else again
