// Draws the charts in the colours of the theme, and again when the theme or a width changes.
"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  let colours = new Map();

  // Plotly needs colours, not names of custom properties; the browser resolves light-dark().
  function resolve(name) {
    if (!colours.has(name)) {
      probe.style.color = `var(${name})`;
      colours.set(name, getComputedStyle(probe).color);
    }
    return colours.get(name);
  }

  function themed(value, key = "") {
    if (Array.isArray(value)) return value.map((member) => themed(member, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    }
    const isName = key.endsWith("color") && typeof value === "string" && value.startsWith("--");
    return isName ? resolve(value) : value;
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
    colours = new Map();
    charts.forEach(draw);
    // Plotly measures text in an image of its own, which says nothing to a screen reader.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function themeChanged() {
    button.setAttribute("aria-pressed", String(isDark()));
    drawAll();
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    themeChanged();
  });
  dark.addEventListener("change", themeChanged);

  const byKey = new Map(charts.map((chart) => [chart.key, chart]));
  const observer = new ResizeObserver((entries) => {
    entries.forEach((entry) => draw(byKey.get(entry.target.id)));
  });

  // Paper is white and has a width of its own, which the observer reports.
  let before;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    themeChanged();
  });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    themeChanged();
  });

  document.querySelectorAll("details.repeat").forEach((details) => {
    const inside = charts.filter((chart) => details.querySelector(`#${chart.key}`) !== null);
    details.addEventListener("toggle", () => inside.forEach(draw));
  });
  themeChanged();
  charts.forEach((chart) => {
    const plot = document.getElementById(chart.key);
    if (plot !== null) observer.observe(plot);
  });
})();
