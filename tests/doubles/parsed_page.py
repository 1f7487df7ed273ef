"""A page as a browser reads it."""

from html.parser import HTMLParser


class ParsedPage(HTMLParser):
    """Every tag, attribute and visible text of a page, and the tags left open."""

    VOID = frozenset(("meta", "link", "br", "hr", "img", "input"))

    def __init__(self, source: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(source)

    @property
    def figures(self) -> list[str]:
        return [value for tag, name, value in self.attributes if tag == "figure" and name == "id"]

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unexpected </{tag}>"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
