"""Building blocks of the page: sections, tables, figures with captions, notices."""

from collections.abc import Iterable, Sequence

from vafl.observe.report.markup import Content, Markup, element


def _prose(content: Iterable[Content]) -> list[Content]:
    """Return texts with typographic apostrophes and `backquoted` parts as code; keep elements unchanged."""
    return [
        _text(each) if isinstance(each, str) and not isinstance(each, Markup) else each for each in content
    ]


def _text(words: str) -> list[Content]:
    parts = words.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}").split("`")
    return [element("code", part) if number % 2 else part for number, part in enumerate(parts)]


def section(title: str, *content: Content) -> Markup:
    """Return a section with a heading."""
    return element("section", element("h2", title), *content)


def text(*content: Content) -> Markup:
    """Return a paragraph."""
    return element("p", _prose(content))


def note(*content: Content) -> Markup:
    """Return a paragraph in small print."""
    return element("p", _prose(content), class_="note")


def notice(title: str, *content: Content, kind: str = "warn") -> Markup:
    """Return a highlighted paragraph. `kind` is a class of the style sheet."""
    return element("p", element("strong", title), " ", _prose(content), class_=f"notice {kind}")


def table(
    headings: Sequence[Content], lines: Sequence[Sequence[Content]], caption: str, *, kind: str = ""
) -> Markup:
    """Return a table that scrolls horizontally on a narrow page.

    Args:
        headings: One heading per column.
        lines: The lines of the table, with one cell per heading.
        caption: What the table shows, for screen readers.
        kind: A class of the style sheet.
    """

    def cells(name: str, line: Sequence[Content]) -> list[Markup]:
        return [
            element(
                "th" if not number and name == "td" else name,
                cell,
                scope="row" if not number and name == "td" else "col" if name == "th" else None,
            )
            for number, cell in enumerate(line)
        ]

    inside = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", cells("th", headings))),
        element("tbody", (element("tr", cells("td", line)) for line in lines)),
    )
    return element(
        "div", inside, class_=f"wide {kind}".rstrip(), tabindex=0, role="region", aria_label=caption
    )


def figure(heading: str, drawing: Markup, *reading: Content) -> Markup:
    """Return a drawing with a heading above it and an explanation below it."""
    return element(
        "figure", element("h3", heading), drawing, element("figcaption", _prose(reading)) if reading else ""
    )


def figures(*content: Content) -> Markup:
    """Return figures that are side by side on a wide page."""
    return element("div", *content, class_="figures")


def legend(names: Sequence[tuple[str, str]]) -> Markup:
    """Return a legend.

    Args:
        names: The style class and the name of each series.
    """
    entries = (
        element("li", element("i", class_=f"key {kind}"), element("span", name)) for kind, name in names
    )
    return element("ul", entries, class_="legend")
