"""The look of the report, light and dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1a2230; --quiet: #566073; --line: #e2e6ec;
  --blue: #1f5fbf; --orange: #c2410c; --green: #0b7566; --heat: #1d4fc4; --bad: #c01c28;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1218; --card: #171d27; --ink: #e7ebf2; --quiet: #9ba7b9; --line: #2a3342;
    --blue: #74acff; --orange: #ff9d5c; --green: #4fd1b8; --heat: #8bb9ff; --bad: #ff7b80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main, header { max-width: 1040px; margin: 0 auto; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.7rem; }
h3 { font-size: 0.95rem; margin: 0; }
p { margin: 0.3rem 0; }
.quiet, .unit, .x-title { color: var(--quiet); }
.note { border-left: 3px solid var(--bad); padding-left: 0.7rem; margin: 0 0 0.8rem; }
.card, figure, details {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 0 0 1rem; padding: 1rem 1.2rem; min-width: 0;
}
code { font: 0.85em/1.4 ui-monospace, "Cascadia Mono", Consolas, monospace;
  overflow-wrap: anywhere; }

.tiles { display: grid; gap: 0.8rem; margin: 1.2rem 0 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tiles > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.7rem 1rem; }
.tiles dt { color: var(--quiet); font-size: 0.85rem; }
.tiles dd { margin: 0; }
.tiles strong { font-size: 1.5rem; line-height: 1.3; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.tiles small { display: block; color: var(--quiet); }

.pair { display: grid; gap: 0 1rem; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
figcaption { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; align-items: baseline;
  justify-content: space-between; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0;
  font-size: 0.85rem; color: var(--quiet); }
.legend li::before { content: ""; display: inline-block; width: 18px; vertical-align: middle;
  margin-right: 6px; border-top: 3px solid var(--color); }
.legend .faint::before { opacity: 0.4; }
.legend .dots::before { width: 9px; height: 9px; border: 0; border-radius: 50%;
  background: var(--color); }
.unit, .x-title, .y-tick, .x-tick { font-size: 12px; }
.unit { margin: 0.4rem 0 0.5rem; }
.x-title { text-align: right; margin: 1.5rem 0 0; }
.plot { position: relative; height: 260px; margin: 0 1rem 0 2.9rem; }
.pair .plot { height: 200px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round;
  stroke: var(--color); }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.train { --color: var(--blue); }
.held-out { --color: var(--orange); }
.rate { --color: var(--green); }
.plot .faint { stroke-width: 1; opacity: 0.45; }
.plot .bold { stroke-width: 2.25; }
.plot .dots { stroke-width: 1.5; }
.plot .dot { stroke-width: 8; stroke-linecap: round; pointer-events: all; opacity: 1; }
.y-tick, .x-tick { position: absolute; color: var(--quiet); white-space: nowrap;
  font-variant-numeric: tabular-nums; line-height: 1; }
.y-tick { right: 100%; margin-right: 8px; transform: translateY(-50%); }
.x-tick { top: 100%; margin-top: 8px; transform: translateX(-50%); }

.samples { display: grid; gap: 0.35rem 1rem; margin: 0; grid-template-columns: 5.5rem 1fr; }
.samples dt { color: var(--quiet); font-size: 0.85rem; line-height: 1.65; }
.samples dd { margin: 0; overflow-wrap: anywhere; }
.samples + p { margin: 0.8rem 0; }
.samples .model { font-weight: 600; }
.continuation { white-space: pre-wrap; }

@media (max-width: 480px) {
  .samples { grid-template-columns: 1fr; gap: 0; }
  .samples dd + dt { margin-top: 0.5rem; }
}

.scroll { overflow-x: auto; padding-bottom: 4px; }
.heat { display: block; }
.heat text { font-size: 12px; fill: var(--ink); }
.heat .row { text-anchor: end; dominant-baseline: central; }
.heat rect { fill: var(--heat); }
.heat .field { fill: var(--line); fill-opacity: 0.45; }
.heat .invalid { fill: var(--bad); }
.heat rect:hover { stroke: var(--ink); }
.heat .field:hover { stroke: none; }
.scale { display: flex; gap: 0.8rem; margin-top: 0.8rem; color: var(--quiet); font-size: 12px;
  line-height: 1; }
.ramp { width: 200px; height: 12px; border-radius: 3px; margin-bottom: 5px;
  background: linear-gradient(to right, transparent, var(--heat)), var(--line); }
.ramp-ticks { display: flex; justify-content: space-between; }

summary { cursor: pointer; font-weight: 600; }
details > :nth-child(2) { margin-top: 0.8rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--quiet); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details table { width: auto; }
details :is(th, td) { padding-right: 1.6rem; }
.settings { display: grid; gap: 1.2rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
"""
