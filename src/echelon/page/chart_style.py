"""The style sheet and the script of charts and of rows with bars."""

from __future__ import annotations

from echelon.page.colours import MEANINGS, colour_style

_BARS = "".join(f".lanes i.{meaning} {{ --c: var(--{meaning}); }}\n" for meaning in MEANINGS)

CHART_STYLE = (
    colour_style()
    + _BARS
    + """
.chart, .rows { position: relative; margin-top: 12px; }
.unit, .axis { color: var(--muted); font-size: 12.5px; }
.axis { text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 10px; padding: 0;
  list-style: none; font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend i { flex: none; width: 16px; height: 0; border-top: 3px solid var(--c); }
.legend i.faint { opacity: .45; border-top-width: 1px; }
.legend i.dashed { border-top: 2px dashed var(--c); }
.legend i.dots, .legend i.joined { width: 8px; height: 8px; border: 0; border-radius: 50%;
  background: var(--c); }
.legend i.area, .legend i.steps, .legend i.box { width: 11px; height: 11px; border: 0;
  border-radius: 2px; background: var(--c); }
.legend i.mark { width: 0; height: 13px; border: 0; border-left: 2px solid var(--c); }
.plot { position: relative; margin: 0 14px 0 46px; border-bottom: 1px solid var(--edge); }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; fill-opacity: .88;
  vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.plot .grid { stroke: var(--rule); stroke-width: 1px; }
.plot .line { stroke-width: 2.25px; }
.plot .faint { stroke-width: 1px; opacity: .4; }
.plot .dashed { stroke-width: 1.5px; stroke-dasharray: 5 4; }
.plot .dots { stroke-width: 4.5px; stroke-linecap: round; }
.plot .mark { stroke-width: 2px; }
.ys span, .xs span { position: absolute; color: var(--muted); font-size: 12px; line-height: 16px;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.ys span { right: calc(100% + 8px); transform: translateY(-50%); }
.xs { position: relative; height: 18px; margin-top: 5px; }
.chart > .xs { margin: 5px 14px 0 46px; }
.xs span { transform: translateX(-50%); }
.tip { position: absolute; z-index: 2; top: 0; pointer-events: none; padding: 6px 9px;
  background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; font-size: 12.5px;
  line-height: 1.4; white-space: nowrap; box-shadow: 0 2px 8px rgba(0, 0, 0, .18); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--muted);
  pointer-events: none; }
.lanes { display: grid; grid-template-columns: fit-content(190px) 1fr fit-content(110px);
  gap: 5px 10px; align-items: center; font-size: 13px; }
.lanes .name { overflow-wrap: anywhere; line-height: 1.25; }
.lanes .total { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.lanes .group { grid-column: 1 / -1; margin-top: 8px; font-weight: 600; }
.lanes .axis { grid-column: 1 / -1; }
.lanes .xs { margin-top: 0; }
.track { position: relative; height: 20px; background: var(--code); border-radius: 3px; }
.track i { position: absolute; min-width: 2px; top: 0; bottom: 0; background: var(--c);
  border-radius: 2px; container-type: inline-size; font-style: normal;
  box-shadow: inset -1px 0 0 var(--panel); }
.rows + .scroll, .rows + h3 { margin-top: 18px; }
.track b { display: none; font-weight: 500; font-size: 11px; line-height: 20px; text-align: center;
  color: var(--on-bar); }
@container (min-width: 34px) { .rows + .scroll, .rows + h3 { margin-top: 18px; }
.track b { display: block; } }
:root { --on-bar: #fff; }
@media (prefers-color-scheme: dark) { :root { --on-bar: #0d1117; } }
.track i.inputs, .track i.backward, .track i.communication, .track i.gathered,
.track i.weights, .track i.gradients { --on-bar: #0d1117; }
.track i.idle { --on-bar: var(--ink); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 28px; }
.pair > * { min-width: 0; }
td.heat { background: color-mix(in srgb, var(--heat) calc(var(--share) * 1%), transparent); }
:root { --heat: #f4b183; }
@media (prefers-color-scheme: dark) { :root { --heat: #8a4b1c; } }
@media (max-width: 640px) {
  .pair { grid-template-columns: 1fr; gap: 18px; }
  .xs span:nth-child(even) { display: none; }
  .lanes { grid-template-columns: fit-content(98px) 1fr fit-content(86px); gap: 5px 7px;
    font-size: 12.5px; }
}
"""
)

# Shows the values of all curves under the pointer. Without it the page says the same, less finely.
CHART_SCRIPT = """
addEventListener('DOMContentLoaded', () => document.querySelectorAll('.chart').forEach(chart => {
  const data = JSON.parse(chart.querySelector('script').textContent);
  const plot = chart.querySelector('.plot'), [low, high] = data.x;
  const tip = document.createElement('div'), cursor = document.createElement('div');
  tip.className = 'tip'; cursor.className = 'cursor';
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect();
    const x = low + (high - low) * (event.clientX - box.left) / box.width;
    let at = null;
    const lines = data.curves.map(([name, xs, ys]) => {
      let i = 0;
      xs.forEach((value, j) => { if (Math.abs(value - x) < Math.abs(xs[i] - x)) i = j; });
      if (!xs.length || ys[i] === null) return '';
      if (at === null || Math.abs(xs[i] - x) < Math.abs(at - x)) at = xs[i];
      return name + ': ' + ys[i].toLocaleString('en', {maximumSignificantDigits: 5});
    });
    if (at === null) return;
    tip.innerText = [data.of + ' ' + at.toLocaleString('en'), ...lines.filter(Boolean)].join('\\n');
    plot.append(tip, cursor);
    const left = (at - low) / (high - low) * box.width;
    cursor.style.left = left + 'px';
    tip.style.left = Math.max(0, Math.min(left + 12, box.width - tip.offsetWidth)) + 'px';
  });
  plot.addEventListener('pointerleave', () => { tip.remove(); cursor.remove(); });
}));
"""
