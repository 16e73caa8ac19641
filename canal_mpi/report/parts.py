"""Pieces of the page: tables, cards, figures, notes. Everything that comes in is escaped here."""

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite

from canal_mpi.report.figures import Figure
from canal_mpi.report.svg import number

Cell = str | float | int


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]], key: str = "") -> str:
    """A table that sorts when a head is clicked; numbers are aligned to the right."""
    lines = [list(row) for row in rows]
    if not lines:
        return note(f"{caption}: nothing to show.")
    numeric = [all(isinstance(line[k], int | float) for line in lines) for k in range(len(head))]
    heads = "".join(
        f'<th scope="col"{_n(numeric[k])}><button type="button">{escape(name)}</button></th>'
        for k, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(_cell(value) for value in line)}</tr>" for line in lines)
    mark = f' id="{escape(key)}"' if key else ""
    return (
        f'<div class="table"><table{mark}><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _n(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _cell(value: Cell) -> str:
    if isinstance(value, Best):
        return f'<td class="n best" data-v="{float(value)!r}">{number(float(value))}</td>'
    if isinstance(value, int | float):
        given = repr(float(value)) if isfinite(value) else ""
        return f'<td class="n" data-v="{given}">{number(float(value))}</td>'
    wide = ' class="wrap"' if len(value) > 50 else ""
    return f"<td{wide}>{escape(value)}</td>"


class Best(float):
    """A number that is the best of its row."""


def card(question: str, answer: str, words: str, tone: str = "") -> str:
    """A question, its answer in large, and a sentence."""
    return (
        f'<section class="card"><h2>{escape(question)}</h2>'
        f'<strong class="{tone}">{escape(answer)}</strong><p>{escape(words)}</p></section>'
    )


def figure(shown: Figure, prefix: str = "") -> str:
    """A drawing with its title and caption."""
    wide = " wide" if shown.wide else ""
    caption = f"<figcaption>{escape(shown.caption)}</figcaption>" if shown.caption else ""
    return (
        f'<figure id="{escape(prefix + shown.key)}"><h3>{escape(shown.title)}</h3>'
        f'<div class="draw{wide}">{shown.drawing}</div>{caption}</figure>'
    )


def row(figures: Iterable[Figure], prefix: str = "", cls: str = "") -> str:
    """Figures beside each other, as many as fit."""
    shown = "".join(figure(f, prefix) for f in figures)
    return f'<div class="row {cls}">{shown}</div>'


def key(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours mean."""
    spots = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in entries
    )
    return f'<div class="key">{spots}</div>'


def note(words: str) -> str:
    """Something the reader must know."""
    return f'<p class="note">{escape(words)}</p>'


def chips(words: Iterable[str]) -> str:
    """Short facts in a row."""
    return "".join(f'<span class="chip">{escape(word)}</span>' for word in words)


def folded(title: str, inside: str, opened: bool = False) -> str:
    """Something that opens on a click."""
    return f"<details{' open' * opened}><summary>{escape(title)}</summary>{inside}</details>"


def code(words: str) -> str:
    """Text as it is."""
    return f"<pre>{escape(words)}</pre>"
