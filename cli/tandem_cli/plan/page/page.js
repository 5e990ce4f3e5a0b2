// Connects controls, simulation and pictures. A change of a control draws timelines and figures at
// once, and the slower charts step by step afterwards.
"use strict";
(() => {
  const { data, CONTROLS } = Model;
  const { number, seconds, range } = Charts;
  const byId = (id) => document.getElementById(id);
  const SCALE = 1000; // steps of a logarithmic slider
  const QUIET = 300; // milliseconds without a change before the summary is said
  const SLICE = 12; // milliseconds of slow charts between two looks at the controls
  const FIGURES = [
    ["TTFT, median", "ttft50", seconds], ["TTFT, p99", "ttft99", seconds],
    ["ITL, median", "itl50", seconds], ["ITL, p99", "itl99", seconds], ["Gap, p99", "gap99", seconds],
    ["E2E, mean", "e2eMean", seconds], ["E2E, p99", "e2e99", seconds],
    ["Within the objective", "attainment", (share) => `${number(100 * share)} %`, true],
    ["Goodput, requests/s", "goodput", number, true],
  ];
  // Of what is saved, where it is not seconds.
  const UNITS = { attainment: "share", goodput: "requests/s", growth: "s/s", prompt: "tokens", output: "tokens" };
  const NAMES = { colocated: "Co-located", split: "Split" };

  let state = Model.parsed(location.hash), outcomes = {}, drawnCharts = {}, changedAt = performance.now(), frame = 0, quiet = 0, slices = 0;

  // Controls.

  function bounds(name) {
    const { min, max, sliderMin = min, sliderMax = max } = CONTROLS[name];
    return [sliderMin, sliderMax];
  }
  function toSlider(name, value) {
    const [low, high] = bounds(name);
    if (CONTROLS[name].none && !value) return SCALE;
    return CONTROLS[name].isLog ? (SCALE * Math.log(value / low)) / Math.log(high / low) : value;
  }
  function fromSlider(name, position) {
    const [low, high] = bounds(name);
    return CONTROLS[name].isLog ? Number((low * (high / low) ** (position / SCALE)).toPrecision(3)) : position;
  }

  function setUp(control) {
    const { name, unit } = control.dataset, [box, slider] = control.querySelectorAll("input");
    const { min, max, step, isLog, none } = CONTROLS[name], [low, high] = bounds(name);
    Object.assign(box, { min: none ? 0 : min, max });
    Object.assign(slider, isLog ? { min: 0, max: SCALE, step: 1 } : { min: low, max: high, step });
    slider.addEventListener("input", () => change({ [name]: Model.clamp(name, fromSlider(name, Number(slider.value))) }));
    // What is typed counts while it is valid; when the box is left, it shows what counts.
    box.addEventListener("input", () => {
      if (box.value !== "" && box.checkValidity()) change({ [name]: Model.clamp(name, Number(box.value)) });
    });
    box.addEventListener("change", () => show(control, true));
    return { control, name, unit, box, slider };
  }

  function show(control, isForced = false) {
    const { name, unit } = control.dataset, [box, slider] = control.querySelectorAll("input");
    const text = String(Number(state[name].toPrecision(6)));
    if (isForced || document.activeElement !== box) box.value = text;
    slider.value = toSlider(name, state[name]);
    slider.setAttribute("aria-valuetext", CONTROLS[name].none && !state[name] ? "no limit" : `${text} ${unit}`.trim());
  }

  const controls = [...document.querySelectorAll(".control[data-name]")];
  controls.forEach(setUp);
  // On a narrow screen the pictures come below: close all settings but the workload's.
  if (window.matchMedia("(max-width: 40rem)").matches) {
    [...byId("controls").querySelectorAll("details")].slice(1).forEach((details) => { details.open = false; });
  }
  data.fabrics.forEach(({ title }) => byId("fabric").append(new Option(title, title)));
  byId("fabric").append(new Option("another", ""));
  byId("fabric").addEventListener("change", ({ target }) => {
    if (target.value) change({ bandwidth: Model.fabric(target.value) });
  });
  data.models.forEach(({ title }, index) => byId("model").append(new Option(title, index)));
  byId("model").addEventListener("change", ({ target }) => change({ model: Number(target.value) }));
  document.querySelectorAll("[data-experiment]").forEach((button) => {
    button.addEventListener("click", () => change(Model.EXPERIMENTS[button.dataset.experiment]));
  });
  byId("requests").addEventListener("toggle", ({ target }) => target.open && Charts.requests(state, outcomes));
  byId("reset").addEventListener("click", () => change(Model.started()));
  byId("csv").addEventListener("click", saveCsv);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", () => {
    // A link to a section is no state.
    if (location.hash.includes("=")) change(Model.parsed(location.hash));
  });

  function showControls() {
    controls.forEach((control) => show(control));
    const chosen = data.fabrics.find(({ title }) => Model.fabric(title) === state.bandwidth);
    byId("fabric").value = chosen ? chosen.title : "";
    byId("model").value = state.model;
    document.querySelectorAll("[data-experiment]").forEach((button) => {
      const settings = Model.EXPERIMENTS[button.dataset.experiment];
      const isSet = Object.keys(settings).every((name) => settings[name] === state[name]);
      button.setAttribute("aria-pressed", String(isSet));
    });
    byId("link").href = Model.link(state);
  }

  // Drawing.

  // Changes within one frame are drawn together.
  function change(changes) {
    state = { ...state, ...changes };
    document.body.dataset.charts = "drawing";
    changedAt ??= performance.now();
    frame ||= requestAnimationFrame(update);
  }

  function update() {
    frame = 0;
    for (const architecture of ["colocated", "split"]) outcomes[architecture] = Model.outcome(state, architecture);
    showControls();
    draw();
    figures();
    Charts.network(state);
    if (byId("requests").open) Charts.requests(state, outcomes);
    clearTimeout(quiet);
    quiet = setTimeout(settled, QUIET);
    byId("drawn").textContent = `${number(performance.now() - changedAt)} ms`;
    changedAt = null;
  }

  function draw() {
    for (const architecture of ["colocated", "split"]) {
      const outcome = outcomes[architecture], canvas = byId(`${architecture}-timeline`);
      if (outcome.error) Timeline.clear(canvas);
      else Timeline.draw(canvas, outcome, state);
      byId(`${architecture}-timeline-pods`).textContent = pods(architecture);
      byId(`${architecture}-timeline-text`).textContent = described(outcome);
    }
    document.querySelectorAll("canvas[data-kind]").forEach(Timeline.legend);
  }

  function pods(architecture) {
    const { prefills, decodes, colocated, chunk } = state, gpus = Model.gpus(state, architecture);
    const text = architecture === "split"
      ? `${prefills} prefill + ${decodes} decode`
      : `${colocated} pod${colocated > 1 ? "s" : ""}, ${chunk ? `chunks of ${number(chunk, 5)}` : "whole prompts"}`;
    return `${text}, ${gpus} GPU${gpus > 1 ? "s" : ""}`;
  }

  function described({ error, run, figures: found, keepsUp }) {
    if (error) return `Not possible: ${error}.`;
    const until = state.from + state.span;
    const arrived = run.outcomes.filter(({ at }) => at >= state.from && at <= until);
    const long = arrived.filter(({ request }) => request.isLong).length;
    const missed = arrived.filter((each) => !Model.seen(each, state).isMet).length;
    const overload = keepsUp ? "" : " These pods do not keep up: the longer the load lasts, the later the first tokens.";
    return `${unknown()}From ${number(state.from)} to ${number(until)} s: ${arrived.length} requests arrive, ${long} with a long prompt; `
      + `${missed} miss the objective. Of all, p99: first token after ${seconds(found.ttft99.value)}, gap between tokens ${seconds(found.gap99.value)}.${overload}`;
  }

  function figures() {
    const body = document.querySelector("#figures-table tbody"), both = ["colocated", "split"].map((name) => outcomes[name]);
    const lines = FIGURES.map(([title, name, format, isMore]) => {
      const line = Charts.row([title, "", ""]), values = both.map((each) => each.figures?.[name]);
      values.forEach((figure, index) => {
        const cell = line.children[index + 1];
        if (!figure) return void (cell.textContent = "–");
        const note = document.createElement("span");
        note.className = "note";
        note.textContent = ` (${range(figure.low, figure.high, format)})`;
        cell.append(name === "goodput" && !both[index].keepsUp ? "does not keep up" : format(figure.value), note);
      });
      // Better, if it is so under each of the assumptions.
      const better = (one, other) => one && other
        && one.values.every((value, index) => (isMore ? value > other.values[index] : value < other.values[index]));
      if (better(values[1], values[0])) line.className = "better-split";
      if (better(values[0], values[1])) line.className = "better-colocated";
      return line;
    });
    lines.push(Charts.row(["Goodput per GPU", ...both.map((each) => (each.keepsUp ? number(each.figures.goodput.value / each.gpus) : "–"))]));
    lines.push(Charts.row(["GPUs", ...both.map(({ gpus }) => String(gpus))]));
    body.replaceChildren(...lines);
  }

  // The controls rest: say what is to see, keep the link, and draw the slow charts.
  function settled() {
    history.replaceState(null, "", Model.link(state));
    byId("summary").textContent = summary();
    drawSlowly();
  }

  function summary() {
    const { colocated, split } = outcomes;
    if (unknown()) return unknown().trim();
    const failed = [colocated, split].find(({ error }) => error);
    if (failed) return `${NAMES[failed.architecture]} pods cannot serve this: ${failed.error}.`;
    const compared = [["99th percentile of the gaps between tokens", "gap99"], ["99th percentile of TTFT", "ttft99"]].map(([title, name]) => {
      const [a, b] = [colocated.figures[name].value, split.figures[name].value];
      return `${title}: ${seconds(a)} co-located, ${seconds(b)} split`;
    });
    const [a, b] = [colocated, split].map(({ figures: { attainment } }) => `${number(100 * attainment.value)} %`);
    const share = `Within the objective: ${a} co-located, ${b} split`;
    const unequal = colocated.gpus === split.gpus ? "" : ` Unequal: ${colocated.gpus} GPUs against ${split.gpus}.`;
    const overloaded = [colocated, split].filter(({ keepsUp }) => !keepsUp).map(({ architecture }) => ` ${NAMES[architecture]} pods do not keep up.`);
    return `${[...compared, share].join(". ")}.${unequal}${overloaded.join("")}`;
  }

  // Of the workload, before what is simulated all the same.
  function unknown() {
    const reason = Model.unknown(Model.longestPrompt(state));
    return reason && `${reason} `;
  }

  function drawSlowly() {
    clearTimeout(slices);
    drawnCharts = {};
    const refuse = (reason) => {
      drawnCharts = {};
      Charts.refused(reason);
      document.body.dataset.charts = "drawn";
    };
    if (unknown()) return refuse(unknown().trim());
    const choose = (prefills, decodes) => change({ prefills, decodes });
    const steps = (function* all() {
      drawnCharts.goodput = yield* Charts.goodput(state);
      drawnCharts.ratio = yield* Charts.ratio(state, choose);
      yield* Charts.bounds(drawnCharts.goodput, state);
    })();
    const slice = () => {
      const until = performance.now() + SLICE;
      try {
        while (performance.now() < until) {
          if (steps.next().done) return void (document.body.dataset.charts = "drawn");
        }
      } catch (error) {
        return refuse(`Not possible: ${error.message}.`);
      }
      slices = setTimeout(slice);
    };
    slice();
  }

  // Calls `listener` when the element has another width than before.
  function onWidth(element, listener) {
    let width = element.clientWidth;
    new ResizeObserver(() => {
      if (element.clientWidth === width) return;
      width = element.clientWidth;
      listener();
    }).observe(element);
  }

  // What is shown, one value a line.

  function* csvRows() {
    yield ["table", "architecture", "item", "figure", "value", "low", "high", "unit"];
    const calibration = data.isCalibrated ? "calibrated with a profile" : "not calibrated";
    const about = { model: data.model, gpu: data.gpu, calibration, version: data.version };
    for (const [name, value] of Object.entries(about)) yield ["about", "", "", name, value, "", "", ""];
    const unit = (name) => document.querySelector(`.control[data-name=${name}]`)?.dataset.unit ?? "";
    for (const [name, value] of Object.entries(state)) yield ["settings", "", "", name, value, "", "", unit(name)];
    for (const [architecture, { figures: found, run }] of Object.entries(outcomes)) {
      if (!run) continue;
      for (const [name, { value, low, high }] of Object.entries(found)) yield ["figures", architecture, "", name, value, low, high, UNITS[name] ?? "s"];
      for (const outcome of run.outcomes) {
        const { ttft, itl, e2e } = Model.seen(outcome, state), { prompt, output } = outcome.request;
        const values = { at: outcome.at, prompt, output, ttft, itl, e2e };
        for (const [name, value] of Object.entries(values)) yield ["request", architecture, outcome.work.index, name, value, "", "", UNITS[name] ?? "s"];
      }
    }
    for (const { name, points } of drawnCharts.goodput ?? []) {
      for (const [rate, share] of points) yield ["goodput", name, rate, "attainment", share, "", "", UNITS.attainment];
    }
    for (const { prefills, decodes, rate, binds } of drawnCharts.ratio ?? []) {
      yield ["ratio", "split", `${prefills}:${decodes}`, binds, rate, "", "", UNITS.goodput];
    }
  }

  function saveCsv() {
    const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replace(/"/g, '""')}"` : value);
    const text = [...csvRows()].map((cells) => cells.map(quoted).join(",")).join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "text/csv" }));
    link.download = "tandem-plan.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href));
  }

  Theme.listen(draw);
  update();
  onWidth(document.querySelector(".pictures"), draw);
  onWidth(byId("goodput-plot"), () => drawnCharts.goodput && drawSlowly());
})();
