// Draws the charts in the colours of the theme, and again when the theme or a width changes.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);

  function themed(value, key = "") {
    if (Array.isArray(value)) return value.map((member) => themed(member, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    }
    const isName = key.endsWith("color") && typeof value === "string" && value.startsWith("--");
    return isName ? Theme.colour(value) : value;
  }

  // Dragging zooms with a mouse; on a touch screen it must scroll the page.
  const dragmode = window.matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const config = { displayModeBar: false, displaylogo: false, showTips: false };

  function draw(chart) {
    const plot = document.getElementById(chart.key);
    // A chart in a closed <details> is drawn when that is opened.
    if (plot === null || !plot.checkVisibility()) return;
    const rows = Math.ceil(chart.data.length / (plot.clientWidth < 560 ? 1 : 3));
    plot.style.setProperty("--rows", rows);
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    Plotly.react(plot, themed(chart.data), { ...themed(chart.layout), ...size, dragmode }, config);
  }

  function drawAll() {
    charts.forEach(draw);
    // Plotly measures text in an image of its own, which says nothing to a screen reader.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
  }

  const byKey = new Map(charts.map((chart) => [chart.key, chart]));
  const observer = new ResizeObserver((entries) => {
    entries.forEach((entry) => draw(byKey.get(entry.target.id)));
  });

  document.querySelectorAll("details.repeat").forEach((details) => {
    const inside = charts.filter((chart) => details.querySelector(`#${chart.key}`) !== null);
    details.addEventListener("toggle", () => inside.forEach(draw));
  });
  Theme.listen(drawAll);
  drawAll();
  charts.forEach((chart) => {
    const plot = document.getElementById(chart.key);
    if (plot !== null) observer.observe(plot);
  });
})();
