"""Audit one configuration: canaries if it claims a guarantee, then attacks on one run."""

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
    """The results of an audit.

    Attributes:
        findings: the results of the canary audits.
        attacks: the results of the attacks on a run.
        silent: why there are no findings; empty if there are some.
    """

    findings: list[Finding]
    attacks: list[Attack]
    silent: str = ""

    @property
    def verdict(self) -> str:
        """The worst verdict of all findings: `broken`, `cannot tell`, `holds`; else `nothing claimed`."""
        verdicts = {finding.verdict for finding in self.findings}
        worst_first = ("broken", "cannot tell", "holds")
        return next((verdict for verdict in worst_first if verdict in verdicts), "nothing claimed")

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
    """Audit the privacy settings with canaries, then attack a run of the whole configuration.

    Args:
        config: the configuration to audit.
        data: the data of the run; None loads the configured data set.
        canaries: the number of canaries in each audit.
        noise_scale: the factor by which the audited client scales the claimed noise. Values below 1 test
            whether the audit detects missing noise.
    """
    plan = make_plan(config, data)
    findings, silent = _canaries(config, len(plan.data.parties), canaries, noise_scale)
    run = build(config, data)
    heard = Eavesdropper(run)
    run.train()
    attacks = [invert_features(run, heard)]
    if plan.task.loss != "squared":
        truth = plan.data.labels[plan.data.train].numpy().astype(np.int64)
        # With a secure sum, the server answers no client before all have uploaded: a replay gets no
        # gradients.
        replayed = [] if config.privacy.secure_sum else [replay(heard, truth)]
        attacks = [*infer_labels(heard, truth), *replayed, *attacks]
    return Report(findings, attacks, silent)


def _canaries(config: Config, clients: int, canaries: int, noise_scale: float) -> tuple[list[Finding], str]:
    """Return the findings, or the reason why there are none."""
    settings = config.privacy
    if not settings.protection.noises_anything:
        return [], "privacy.mode is none: nothing is claimed"
    if not settings.clip or not settings.noise:
        return [], "nothing is claimed without privacy.clip and privacy.noise"
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
