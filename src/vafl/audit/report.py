"""A whole audit of one configuration: canaries where something is claimed, attacks on a run of it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vafl.audit.attacks import Attack, Eavesdropper, infer_labels, invert_features, replay
from vafl.audit.canaries import (
    AUDITED,
    Finding,
    audit_extreme_slopes,
    audit_mechanism,
    audit_model_channel,
    confirmed,
)
from vafl.config import Config
from vafl.data.partition import VerticalData
from vafl.run.assembly import build
from vafl.run.plan import make_plan


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
    def verdict(self) -> str:
        """The worst of the canaries': `broken`, `cannot tell`, `holds`; `nothing claimed` without any."""
        found = {finding.verdict for finding in self.findings}
        return next(
            (verdict for verdict in ("broken", "cannot tell", "holds") if verdict in found), "nothing claimed"
        )

    def as_json(self) -> dict[str, Any]:
        findings = [
            {
                **asdict(finding),
                "verdict": finding.verdict,
                "power": finding.power,
                "canaries_needed": finding.canaries_needed or None,
            }
            for finding in self.findings
        ]
        return {
            "verdict": self.verdict,
            "audited": AUDITED if findings else None,
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
    plan = make_plan(config, data)
    findings, silent = _canaries(config, len(plan.data.parties), canaries, noise_scale)
    run = build(config, data)
    heard = Eavesdropper(run)
    run.train()
    attacks = [invert_features(run, heard)]
    if plan.task.loss != "squared":
        truth = plan.data.labels[plan.data.train].numpy().astype(np.int64)
        replayed = [] if config.privacy.secure_sum else [replay(heard, truth)]  # nobody is answered alone
        attacks = [*infer_labels(heard, truth), *replayed, *attacks]
    return Report(findings, attacks, silent)


def _canaries(config: Config, clients: int, canaries: int, noise_scale: float) -> tuple[list[Finding], str]:
    settings = config.privacy
    if not settings.protection.noises_anything:
        return [], "privacy.mode is none: nothing is claimed"
    if not settings.clip or not settings.noise:
        return [], "without privacy.clip and privacy.noise no claim can be made"
    used = replace(
        settings,
        noise=settings.noise * noise_scale,
        gradient_noise=settings.gradient_noise * noise_scale,
        layers=(),
    )
    findings = [confirmed(lambda: audit_mechanism(config, used, canaries, clients))]
    if settings.protection.noises_updates:
        findings.append(audit_extreme_slopes(config, used, canaries))
    if settings.protection.exposes_model:
        findings.append(confirmed(lambda: audit_model_channel(config, used, canaries)))
    return findings, ""
