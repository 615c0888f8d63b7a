"""Pictures are SVG that any reader of XML takes, whatever names they show."""

import base64
import re
from xml.etree import ElementTree

from flows.watch.pictures import Bar, bars, lines

SVG = "{http://www.w3.org/2000/svg}"


def svg_of(markdown: str) -> ElementTree.Element:
    (data,) = re.findall(r"^!\[[^]]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)$", markdown)
    return ElementTree.fromstring(base64.b64decode(data))


def test_bars_are_as_long_as_their_values():
    svg = svg_of(bars("Tokens", [Bar("<b>&", 50, "50"), Bar("a name\x1b of more than thirty letters", 200, "200")]))
    ground, half, whole = (float(rect.attrib["width"]) for rect in svg.iter(f"{SVG}rect"))
    assert half * 4 == whole < ground
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert texts[:3] == ["Tokens", "<b>&", "50"]
    assert all("\x1b" not in text and len(text) < 40 for text in texts)


def test_nothing_is_drawn_of_nothing():
    assert bars("Tokens", []) == bars("Tokens", [Bar("a", 0, "0")]) == ""
    assert lines("web", [("download", [(0.0, 1.0)])]) == ""
