"""The page's own style and the few lines of script that show values under the pointer. Nothing is fetched."""

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #69727d; --line: #e3e6ea;
  --warn: #9a6700; --warn-back: #fff6dd; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1b1f25; --ink: #e4e7eb; --soft: #949ea9;
  --line: #2d333b; --warn: #e3b341; --warn-back: #2b2412; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 28px 24px 60px; background: var(--back); color: var(--ink);
  font: 14px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 34px 0 10px; }
.soft, .unit, figcaption .unit { color: var(--soft); font-weight: normal; }
.grid-of { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.grid-of.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
figure, .card { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { padding: 10px 10px 4px; } figcaption { padding: 0 4px 4px; } .card { padding: 0; overflow-x: auto; }
.plot { position: relative; } svg.chart { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.small svg text { font-size: 15px; }
.grid { stroke: var(--line); } .axis, .tick { stroke: var(--soft); } .rule { stroke: var(--soft); visibility: hidden; }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .small polyline { stroke-width: 2.2; }
.faint { opacity: .3; stroke-width: 1; } .dashed { stroke-dasharray: 6 3; }
.c0 { --own: #3b82c4; } .c1 { --own: #e07b39; } .c2 { --own: #3fa66b; } .c3 { --own: #c65b9b; }
.c4 { --own: #8b72d8; } .c5 { --own: #b8962e; } .c6 { --own: #3fa9b5; } .c7 { --own: #d1605e; }
polyline, circle { stroke: var(--own); } circle, .chip { fill: var(--own); } .chip { background: var(--own); }
.chip { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 10px 0 0; position: sticky; top: 0; z-index: 2;
  background: var(--back); padding: 8px 0; }
.tip { position: absolute; top: 6px; display: none; pointer-events: none; background: var(--card); z-index: 1;
  border: 1px solid var(--line); border-radius: 6px; padding: 5px 9px; font-size: 12px; white-space: nowrap;
  box-shadow: 0 2px 8px #0003; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > * { border-bottom: 0; } th { font-weight: 600; white-space: nowrap; } thead th { color: var(--soft); }
.figures :is(th, td):not(:first-child) { text-align: right; white-space: nowrap; }
.wide { overflow-wrap: anywhere; min-width: 12ch; }
.bar { display: block; height: 5px; border-radius: 3px; background: var(--own); margin-top: 3px; min-width: 1px; }
.problem { color: var(--warn); background: var(--warn-back); border-radius: 8px; padding: 8px 14px; margin: 10px 0; }
details { margin: 8px 0; } summary { cursor: pointer; }
pre { margin: 8px 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  overflow: auto; max-height: 480px; font: 12px/1.45 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
mark { background: none; color: var(--soft); }
@media print { body { max-width: none; } .legend { position: static; } figure { break-inside: avoid; } }
"""

SCRIPT = """
for (const svg of document.querySelectorAll("svg.chart")) {
  const {left, right, last} = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
  const tip = svg.parentNode.querySelector(".tip"), rule = svg.querySelector(".rule");
  let lines = null;
  const read = () => [...svg.querySelectorAll(".raw")].map(line => ({
    name: line.dataset.name, chip: [...line.classList].find(c => /^c\\d$/.test(c)),
    steps: line.dataset.steps.split(" ").map(Number), values: line.dataset.values.split(" "),
  }));
  const nearest = (steps, step) => {
    let a = 0, b = steps.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (steps[m] < step) a = m; else b = m; }
    return step - steps[a] < steps[b] - step ? a : b;
  };
  const row = (chip, text) => {
    const out = document.createElement("div");
    if (chip) out.appendChild(document.createElement("span")).className = "chip " + chip;
    out.append(text);
    return out;
  };
  svg.addEventListener("pointermove", event => {
    lines ??= read();
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const step = ((event.clientX - box.left) * scale - left) / (right - left) * last;
    const found = lines.map(line => ({line, at: nearest(line.steps, step)}));
    const steps = found.map(({line, at}) => line.steps[at]);
    const best = steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
    const x = left + best / last * (right - left);
    rule.setAttribute("x1", x); rule.setAttribute("x2", x); rule.style.visibility = "visible";
    tip.replaceChildren(...found.map(({line, at}) =>
      row(line.chip, line.name + ", step " + line.steps[at] + ": " + line.values[at])));
    tip.style.display = "block";
    const after = x / scale + 12, room = after + tip.offsetWidth < box.width;
    tip.style.left = Math.max(0, room ? after : x / scale - tip.offsetWidth - 12) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; rule.style.visibility = "hidden"; });
}
"""
