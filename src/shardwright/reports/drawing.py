"""Boxes and words on a sheet, written as SVG or as PDF: what a picture for a paper needs, without a dependency.

The PDF uses the fonts that every reader has (Helvetica, whose widths are Adobe's published font metrics), one page as large
as the drawing, and no compression (PDF reference 1.4, Adobe 2001).
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import cos, radians, sin

# Widths of Helvetica's characters 32 to 126 in thousandths of the size.
_WIDTHS = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 584 "
    "584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 667 667 "
    "611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 "
    "722 500 500 500 334 260 334 584"
)
WIDTHS = dict(zip(map(chr, range(32, 127)), map(int, _WIDTHS.split()), strict=True))
OTHERWISE = 556


@dataclass(frozen=True)
class Box:
    """A filled rectangle; ``hint`` is shown where one can point at it, ``outline`` is its border's colour."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""
    outline: str = ""


@dataclass(frozen=True)
class Words:
    """A line of text; ``anchor`` is ``start``, ``middle`` or ``end``, ``turn`` in degrees, clockwise."""

    x: float
    y: float
    text: str
    size: float = 12
    bold: bool = False
    anchor: str = "start"
    turn: float = 0.0
    colour: str = "#15191f"


@dataclass(frozen=True)
class Drawing:
    """Boxes and words, later ones over earlier ones."""

    width: float
    height: float
    items: tuple[Box | Words, ...]

    def svg(self) -> str:
        """The drawing as an SVG document."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        inside = "".join(_svg(item) for item in self.items)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
            f'<rect width="100%" height="100%" fill="white"/>{inside}</svg>\n'
        )

    def pdf(self) -> bytes:
        """The drawing as a PDF document of one page."""
        content = "\n".join(_pdf(item, self.height) for item in self.items).encode("cp1252", "replace")
        fonts = "".join(
            f"/{name} << /Type /Font /Subtype /Type1 /BaseFont /{font} /Encoding /WinAnsiEncoding >> "
            for name, font in (("F0", "Helvetica"), ("F1", "Helvetica-Bold"))
        )
        page = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {self.width:g} {self.height:g}] /Contents 4 0 R "
            f"/Resources << /Font << {fonts}>> >> >>"
        )
        objects = [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            page.encode(),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        ]
        out, places = bytearray(b"%PDF-1.4\n"), []
        for number, body in enumerate(objects, 1):
            places.append(len(out))
            out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
        table = b"".join(b"%010d 00000 n \n" % place for place in places)
        start = len(out)
        out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
        out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
        return bytes(out)


def text_width(text: str, size: float) -> float:
    """How wide a line is.

    >>> text_width("il", 1000)
    444.0
    """
    return sum(WIDTHS.get(letter, OTHERWISE) for letter in text) * size / 1000


def _svg(item: Box | Words) -> str:
    if isinstance(item, Box):
        inside = f"<title>{escape(item.hint)}</title>" if item.hint else ""
        place = f'x="{item.x:.1f}" y="{item.y:.1f}" width="{item.width:.1f}" height="{item.height:g}"'
        outline = f' stroke="{item.outline}"' if item.outline else ""
        return f'<rect {place} fill="{item.fill}"{outline}>{inside}</rect>'
    turn = f' transform="rotate({item.turn:g} {item.x:.1f} {item.y:.1f})"' if item.turn else ""
    weight = ' font-weight="bold"' if item.bold else ""
    return (
        f'<text x="{item.x:.1f}" y="{item.y:.1f}" font-size="{item.size:g}" fill="{item.colour}" '
        f'text-anchor="{item.anchor}"{weight}{turn}>{escape(item.text)}</text>'
    )


def _pdf(item: Box | Words, height: float) -> str:
    if isinstance(item, Box):
        place = f"{item.x:.2f} {height - item.y - item.height:.2f} {item.width:.2f} {item.height:.2f} re"
        border = f"{_colour(item.outline)} RG " if item.outline else ""
        return f"{_colour(item.fill)} rg {border}0.7 w {place} {'B' if item.outline else 'f'}"
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[item.anchor] * text_width(item.text, item.size)
    angle = radians(-item.turn)
    x, y = item.x - shift * cos(angle), height - item.y - shift * sin(angle)
    text = item.text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    matrix = f"{cos(angle):.4f} {sin(angle):.4f} {-sin(angle):.4f} {cos(angle):.4f} {x:.2f} {y:.2f}"
    return f"BT /F{int(item.bold)} {item.size:g} Tf {_colour(item.colour)} rg {matrix} Tm ({text}) Tj ET"


def _colour(text: str) -> str:
    return " ".join(f"{int(text[place : place + 2], 16) / 255:.3f}" for place in (1, 3, 5))
