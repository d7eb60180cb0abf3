"""Style sheet of the report: one column of sections, charts in a grid that folds on narrow screens, light and dark."""

_LIGHT = (
    "#0b6bcb",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#b58900",
    "#0c8599",
    "#c2255c",
    "#5c6773",
    "#4263eb",
    "#7c5a3a",
    "#5c940d",
    "#e8a0bf",
)
_DARK = ("#5cabff", "#ff9358", "#69d17f", "#d98cf0", "#f2c94c", "#4dd0e1", "#ff7fab", "#a6b0bb", "#91a7ff", "#d0a67a", "#c0eb75", "#8a4a66")
COLOURS = len(_LIGHT)
"""Series of one chart that can be told apart by colour: as many as a step has phases, and one more."""


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{value};" for i, value in enumerate(values))


_SERIES = "".join(
    f".line{i}{{stroke:var(--c{i});stroke-width:1.8;fill:none;stroke-linejoin:round}}.fill{i}{{fill:var(--c{i})}}.swatch{i}{{background:var(--c{i})}}"
    for i in range(COLOURS)
)

STYLE = (
    f":root{{--bg:#f7f8fa;--panel:#fff;--ink:#1c2128;--soft:#5f6b7a;--edge:#dfe3e8;--ok:#2b8a3e;--no:#c92a2a;{_colours(_LIGHT)}}}"
    "@media(prefers-color-scheme:dark){"
    f":root{{--bg:#14171b;--panel:#1c2026;--ink:#e6e9ee;--soft:#98a3b1;--edge:#2f353d;--ok:#69d17f;--no:#ff8787;{_colours(_DARK)}}}}}"
    + _SERIES
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:28px;line-height:1.2;margin:0;overflow-wrap:anywhere}
header p{margin:6px 0 0;color:var(--soft)}
h2{font-size:18px;margin:36px 0 12px}
.lead{margin:-6px 0 12px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:12px;margin-top:24px}
.card,figure,.scroll{background:var(--panel);border:1px solid var(--edge);border-radius:10px}
.card{padding:14px 16px}
.card .label{font-size:13px;color:var(--soft)}
.card .value{font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;margin:2px 0}
.card .note{font-size:12.5px;color:var(--soft)}
.card.good .value{color:var(--ok)}
.card.bad .value,tr.bad td{color:var(--no);font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;padding:14px 16px 8px;min-width:0}
figcaption{font-weight:600}
figcaption small{font-weight:400;font-size:12.5px;color:var(--soft);margin-left:4px}
figure p{margin:0;font-size:12.5px;color:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft);margin:4px 0 2px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--edge);stroke-width:1}
.tick{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.band{opacity:.16}
.scroll{overflow:auto;max-height:440px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{position:sticky;top:0;background:var(--panel);text-align:left;color:var(--soft);font-weight:600;box-shadow:inset 0 -1px var(--edge)}
th,td{padding:7px 14px;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere}
.health .scroll{max-height:none}
.health td:first-child{min-width:170px}
.health td:last-child{min-width:240px}
.health th,.health td:nth-child(n+2):nth-child(-n+5){white-space:nowrap;overflow-wrap:normal}
tbody tr+tr td{border-top:1px solid var(--edge)}
details{margin-top:18px}
summary{cursor:pointer;font-size:18px;font-weight:600;margin-bottom:10px}
@media print{.scroll{max-height:none}figure,.card{break-inside:avoid}}
"""
)
