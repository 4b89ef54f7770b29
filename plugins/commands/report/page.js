"use strict";
function draw(div) {
  const style = getComputedStyle(div), colour = name => style.getPropertyValue(name);
  const axis = {gridcolor: colour("--line"), linecolor: colour("--soft"), zeroline: false,
    separatethousands: true};
  const {data, layout} = JSON.parse(div.dataset.figure);
  layout.template = {layout: {
    font: {family: style.fontFamily, size: 12, color: colour("--soft")}, showlegend: false,
    paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"), margin: {l: 50, r: 18, t: 8, b: 26},
    xaxis: {...axis, showgrid: false, ticks: "outside", hoverformat: ",d", spikethickness: 1, spikedash: "solid",
      spikecolor: colour("--soft")},
    yaxis: {...axis, automargin: true}, hovermode: "x unified", hoverdistance: -1,
    hoverlabel: {namelength: -1, bgcolor: colour("--card"), bordercolor: colour("--line"),
      font: {color: colour("--ink")}},
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls the page
  }};
  Plotly.react(div, data, layout, {responsive: true, displayModeBar: false});
}
function drawAll() { document.querySelectorAll(".plot").forEach(draw); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
