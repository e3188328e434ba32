"""The report's HTML document: its style, its content security policy and the order of its sections."""

import base64
import hashlib
from importlib.resources import files

from vafl.observe.report import result, sections
from vafl.observe.report.inputs import Inputs
from vafl.observe.report.markup import Markup, element
from vafl.observe.report.words import quoted


def render(inputs: Inputs) -> str:
    """Return the report as an HTML document that loads no other file and runs no script.

    Its content security policy allows only the embedded style sheet. So even if markup got past the escaping,
    it could not load or run anything.
    """
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"Predicting {result.target(inputs)}: model report"),
        element("style", Markup(style)),
    )
    main = element(
        "main",
        result.header(inputs),
        result.result(inputs),
        sections.details(inputs),
        sections.importance(inputs),
        sections.parties(inputs),
        sections.privacy(inputs),
        sections.making(inputs),
        element(
            "footer",
            f"Written by vafl {inputs.run.summary['versions']['vafl']} from the run folder "
            f"{quoted(inputs.run.name)}.",
        ),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), lang='en')}\n"
