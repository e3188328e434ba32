"""HTML and SVG from nested calls, in which every text is escaped."""

from collections.abc import Iterable
from html import escape

_EMPTY = frozenset({"br", "meta"})  # elements without an end tag


class Markup(str):
    """Text that is HTML or SVG already. Any other text is escaped where it is put into an element."""

    __slots__ = ()


Content = str | Iterable["Content"]


def element(name: str, /, *content: Content, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Of the element.
        content: Texts, elements, or iterables of these.
        attributes: `class_` is the class, and other underscores are hyphens. None and False leave one out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{said}>" + ("" if name in _EMPTY else f"{join(*content)}</{name}>"))


def join(*content: Content) -> Markup:
    """Return the contents one after the other."""
    return Markup("".join(_rendered(each) for each in content))


def _rendered(content: Content) -> str:
    if isinstance(content, Markup):
        return content
    return escape(content) if isinstance(content, str) else join(*content)


def _text(value: object) -> str:
    """Return an attribute's text; coordinates have two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
