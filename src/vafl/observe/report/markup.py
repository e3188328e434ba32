"""Build HTML and SVG from nested calls that escape every text."""

from collections.abc import Iterable
from html import escape

_EMPTY = frozenset({"br", "meta"})  # elements without an end tag


class Markup(str):
    """Text that is already HTML or SVG. `element` escapes any other text."""

    __slots__ = ()


Content = str | Iterable["Content"]


def element(name: str, /, *content: Content, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: The element's name.
        content: Texts, elements, or iterables of these.
        attributes: Attribute names, with `class_` for the class and underscores for hyphens. An attribute
            with the value None or False is omitted.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>" + ("" if name in _EMPTY else f"{join(*content)}</{name}>"))


def join(*content: Content) -> Markup:
    """Return the contents, concatenated."""
    return Markup("".join(_rendered(each) for each in content))


def _rendered(content: Content) -> str:
    if isinstance(content, Markup):
        return content
    return escape(content) if isinstance(content, str) else join(*content)


def _text(value: object) -> str:
    """Return an attribute's value as text. Floats, which are coordinates, have at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
