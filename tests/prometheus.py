"""A small reader of Prometheus' text format 0.0.4: it refuses what Prometheus would."""

import re

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\\n]|\\["\\n])*)"(,|$)')
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def parse(text):
    """Name -> [(labels, value)]; every sample must follow the type of its family, which is told once."""
    kinds, found = {}, {}
    assert not text or text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = _SAMPLE.fullmatch(line)
            assert match, line
            name = match["name"]
            family = name if name in kinds else _SUFFIX.sub("", name)
            assert list(kinds)[-1] == family, f"{name} is not among the samples of its family"
            assert name == family or kinds[family] == "histogram"
            found.setdefault(name, []).append((_labels(match["labels"] or ""), float(match["value"])))
    return found


def _labels(text):
    labels, at = {}, 0
    while at < len(text):
        match = _LABEL.match(text, at)
        assert match, text
        labels[match["name"]] = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match["value"])
        at = match.end()
    return labels
