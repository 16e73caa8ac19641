"""How the page looks and its one small script, as text."""

LIGHT = {
    "bg": "#f6f7f9",
    "card": "#ffffff",
    "fg": "#1b1f24",
    "muted": "#5b6570",
    "line": "#d9dee4",
    "heat": "#0072b2",
    "cold": "#d55e00",
    "good": "#087f5b",
    "bad": "#b4451f",
    "played": "#c8ced6",
    "a0": "#0072b2",
    "a1": "#d55e00",
    "a2": "#00855f",
    "a3": "#b4559a",
    "a4": "#a67c00",
    "a5": "#3a9ad0",
    "a6": "#6a4fb3",
    "a7": "#5b6570",
}
DARK = {
    "bg": "#111418",
    "card": "#1a1f25",
    "fg": "#e8ebee",
    "muted": "#9aa5b1",
    "line": "#333b45",
    "heat": "#4fa8e0",
    "cold": "#ff8a4c",
    "good": "#4fd0a5",
    "bad": "#ff9b7a",
    "played": "#46505c",
    "a0": "#4fa8e0",
    "a1": "#ff8a4c",
    "a2": "#3dd6a3",
    "a3": "#e58fc8",
    "a4": "#e5c04b",
    "a5": "#9ad4f7",
    "a6": "#b79cf0",
    "a7": "#b4bcc6",
}

FIGURE = """
text{font:12px system-ui,sans-serif;fill:var(--fg)}.small{font-size:10.5px;fill:var(--muted)}
.tiny{font-size:9.5px;fill:var(--fg)}.bold{font-weight:600}.on{fill:var(--card);font-weight:600}
.grid{stroke:var(--line);stroke-width:1}.edge{stroke:var(--muted);stroke-width:1.4;opacity:.7}
.tip{fill:var(--muted)}.node{stroke:var(--card);stroke-width:2}.mark{stroke:var(--card)}
.learnt{fill:none;stroke:var(--fg);stroke-width:1.5}.cell{stroke:var(--card);stroke-width:1.5}
"""

PAGE = """
*{box-sizing:border-box}html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.7rem;line-height:1.2;margin:.4em 0 .1em}h2{font-size:1.25rem;margin:2em 0 .6em}
h3{font-size:1rem;margin:1.2em 0 .4em}p{margin:.4em 0}.sub,figcaption,.quiet{color:var(--muted)}
figcaption,.quiet,.note{font-size:.88rem}.cards{display:grid;gap:12px;margin:18px 0;
grid-template-columns:repeat(auto-fit,minmax(235px,1fr))}
.card,figure,.table,details,.note{background:var(--card);border:1px solid var(--line);
border-radius:10px;padding:14px 16px;margin:0}
.card h2{font-size:.85rem;font-weight:600;color:var(--muted);margin:0}
.card strong{display:block;font-size:1.75rem;line-height:1.25;font-variant-numeric:tabular-nums}
.card p{font-size:.9rem;margin:.2em 0 0}.good{color:var(--good)}.bad{color:var(--bad)}
.note{border-left:4px solid var(--a4);margin:10px 0}.row{display:grid;gap:12px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr))}
.row.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
figure{min-width:0}figure>h3{margin:0 0 .3em}.draw{overflow-x:auto}
.draw svg{max-width:100%;height:auto;display:block}.draw.wide svg{max-width:none}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:.85rem;color:var(--muted);margin:.3em 0}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px}
.table{overflow-x:auto;padding:4px 8px;margin:10px 0}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);padding:6px 6px 2px;font-size:.88rem}
th,td{padding:5px 8px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right}td.best{font-weight:700}
td.wrap{white-space:normal;min-width:14em}
th button{all:unset;cursor:pointer;font-weight:600}th button:focus-visible{outline:2px solid}
th[aria-sort=ascending] button::after{content:" ▲"}
th[aria-sort=descending] button::after{content:" ▼"}
details{margin:10px 0}summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;background:var(--bg);padding:10px;border-radius:8px;font-size:.82rem}
.chip{display:inline-block;border:1px solid var(--line);border-radius:99px;padding:0 9px;
font-size:.82rem;color:var(--muted);margin:2px 4px 2px 0}
@media print{body{background:#fff}figure,.card,.table{break-inside:avoid}}
@media(max-width:520px){main{padding:12px 10px 40px}.card strong{font-size:1.5rem}}
"""

SCRIPT = """
document.addEventListener("click", (event) => {
  const button = event.target.closest("th button");
  if (!button) return;
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "ascending";
  const value = (row) => {
    const cell = row.cells[column], given = cell.dataset.v;
    return given === undefined ? cell.textContent.trim() : given === "" ? NaN : Number(given);
  };
  const order = (a, b) => {
    const x = value(a), y = value(b);
    if (typeof x === "number" && typeof y === "number") {
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return down ? y - x : x - y;
    }
    return (down ? -1 : 1) * String(x).localeCompare(String(y));
  };
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...[...body.rows].sort(order));
});
"""


def variables(colours: dict[str, str]) -> str:
    """Colours as CSS variables."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def sheet() -> str:
    """The whole style sheet, light and dark."""
    dark = f"@media(prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    paper = f"@media print{{:root{{{variables(LIGHT)}}}}}"
    return f":root{{{variables(LIGHT)}}}{dark}{paper}{PAGE}{FIGURE}"
