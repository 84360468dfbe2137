"""Pictures of the plan's page: HTML bars and inline SVG, with colours from the page's style sheet."""

import html
import math
from collections.abc import Iterable, Sequence


def escape(text: object) -> str:
  return html.escape(str(text), quote=True)


def swatch(colour: int) -> str:
  """A colour's little square, for a legend. `colour` counts the style sheet's --c0, --c1, …"""
  return f'<i class="swatch" style="background:var(--c{colour})"></i>'


def stacked_bar(pieces: Iterable[tuple[str, float, int]], whole: float, unit: str) -> str:
  """(name, value, colour) side by side in a bar as wide as `whole`, or as all of them where that is more."""
  pieces = [piece for piece in pieces if piece[1] > 0]
  used = sum(value for _, value, _ in pieces)
  scale = 100 / max(whole, used)
  spans = "".join(
    f'<span style="width:{value * scale:.3f}%;background:var(--c{colour})" title="{escape(name)}: {value:.2f} {unit}">'
    "</span>"
    for name, value, colour in pieces
  )
  limit = f'<b class="limit" style="left:{whole * scale:.3f}%"></b>' if used > whole else ""
  return f'<div class="stack" role="img" aria-label="{used:.1f} of {whole:.1f} {unit} used">{spans}{limit}</div>'


def bars(rows: Sequence[tuple[str, float, str, int]]) -> str:
  """(name, value, what to write beside it, colour): one bar a row, the longest value full width."""
  longest = max((value for _, value, _, _ in rows), default=0) or 1
  lines = "".join(
    f'<div class="name">{escape(name)}</div><div class="bar"><span style="width:{max(value / longest * 100, 0.4):.2f}%;'
    f'background:var(--c{colour})"></span></div><div class="value">{escape(label)}</div>'
    for name, value, label, colour in rows
  )
  return f'<div class="bars">{lines}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
  """Cells are escaped, unless they are already `Markup`. Columns of `numeric` stand to the right."""
  right = set(numeric)

  def cells(row: Sequence[object], tag: str) -> str:
    return "".join(
      f"<{tag}{' class=n' if i in right else ''}>{cell if isinstance(cell, Markup) else escape(cell)}</{tag}>"
      for i, cell in enumerate(row)
    )

  body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
  return f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


class Markup(str):
  """HTML that is already escaped."""

  __slots__ = ()


def mark(how: str) -> Markup:
  """The mark of a figure: the compiler's or arithmetic's."""
  return Markup(f'<span class="mark {escape(how)}">{escape(how)}</span>')


_WIDTH, _HEIGHT = 400, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34


def log_log(
  series: Sequence[tuple[str, Sequence[tuple[float, float]], int, bool]],
  x_ticks: Sequence[tuple[float, str]],
  point: tuple[float, float, str] | None,
  x_name: str,
  y_name: str,
) -> str:
  """Curves of (name, points, colour, dashed) on logarithmic axes; values below 1 aren't drawn.

  Args:
    x_ticks: (value, label), the first and the last at the ends of the axis.
    point: (x, y, name) of one more mark.
  """
  low, high = math.log10(x_ticks[0][0]), math.log10(x_ticks[-1][0])
  largest = max([y for _, points, _, _ in series for _, y in points] + [10])
  decades = math.ceil(math.log10(largest))

  def x_of(value: float) -> float:
    return _LEFT + (math.log10(value) - low) / ((high - low) or 1) * (_WIDTH - _LEFT - _RIGHT)

  def y_of(value: float) -> float:
    return _HEIGHT - _BOTTOM - math.log10(value) / decades * (_HEIGHT - _TOP - _BOTTOM)

  drawn = []
  for power in range(decades + 1):
    y = y_of(10**power)
    drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>')
  for i, (value, label) in enumerate(x_ticks):
    x = x_of(value)
    anchor = "end" if i and i == len(x_ticks) - 1 else "middle"
    drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="{anchor}">{escape(label)}</text>')
  for name, points, colour, dashed in series:
    shown = [(x, y) for x, y in points if y >= 1]
    if not shown:
      continue
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in shown)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    drawn.append(f'<polyline points="{path}" style="stroke:var(--c{colour})"{dash}/>')
    drawn += [
      f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" style="fill:var(--c{colour})">'
      f"<title>{escape(name)}: {y:,.0f} sequences of {x:,.0f} tokens</title></circle>"
      for x, y in shown
    ]
  if point and point[0] >= x_ticks[0][0] and point[1] >= 1:
    x, y = x_of(point[0]), y_of(point[1])
    drawn.append(f'<path class="here" d="M{x - 5:.1f},{y:.1f}h10M{x:.1f},{y - 5:.1f}v10"/>')
    drawn.append(f'<text x="{x + 7:.1f}" y="{y - 5:.1f}">{escape(point[2])}</text>')
  drawn.append(f'<text x="{(_WIDTH + _LEFT) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
  names = "".join(
    f'<li><svg viewBox="0 0 26 8" class="key" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" '
    f'style="stroke:var(--c{colour})"{" stroke-dasharray=" + chr(34) + "5 4" + chr(34) if dashed else ""}/></svg>'
    f"{escape(name)}</li>"
    for name, _, colour, dashed in series
  )
  return (
    f'<ul class="legend">{names}</ul><svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
    f'aria-label="{escape(y_name)} against {escape(x_name)}">{"".join(drawn)}</svg>'
  )
