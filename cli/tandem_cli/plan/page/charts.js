// Goodput curves, the ratio map and the calculator: from state to elements.
"use strict";
const Charts = (() => {
  const SIZE = 6; // pods of each role in the ratio map
  const numbers = Array.from({ length: SIZE }, (_, index) => index + 1);
  const POINTS = 14;
  const SERIES = {
    whole: { name: "co-located, whole prompts", colour: "--series-2", dash: "7 4", mark: "square" },
    chunks: { name: "co-located, chunks", colour: "--series-4", dash: "2 3", mark: "triangle" },
    split: { name: "split", colour: "--series-1", dash: "none", mark: "circle" },
  };
  const MARKS = {
    circle: (x, y) => `<circle cx="${x}" cy="${y}" r="4"/>`,
    square: (x, y) => `<rect x="${x - 4}" y="${y - 4}" width="8" height="8"/>`,
    triangle: (x, y) => `<path d="M${x} ${y - 5} l5 9 h-10 z"/>`,
  };

  const number = (value, digits = 3) => {
    const rounded = Number(value.toPrecision(digits));
    return Math.abs(rounded) >= 1000 ? Math.round(rounded).toLocaleString("en") : String(rounded);
  };
  const seconds = (value) => (value < 1 ? `${number(1000 * value)} ms` : `${number(value)} s`);
  // Bounds, with one unit where both have the same.
  function range(low, high, format) {
    const [from, to] = [format(low), format(high)], unit = to.slice(to.search(/[^\d.,]*$/));
    return `${unit && from.endsWith(unit) && !/[a-z]/.test(from.slice(0, -unit.length)) ? from.slice(0, -unit.length) : from} – ${to}`;
  }
  const bytes = (value) => (value < 1e9 ? `${number(value / 1e6)} MB` : `${number(value / 1e9)} GB`);

  function row(cells, tag = "td") {
    const line = document.createElement("tr");
    cells.forEach((text, index) => {
      const cell = document.createElement(index ? tag : "th");
      if (!index || tag === "th") cell.scope = tag === "th" ? "col" : "row";
      cell.textContent = text;
      line.append(cell);
    });
    return line;
  }

  // What each series simulates.
  function variants(state) {
    return {
      whole: [{ ...state, chunk: 0 }, "colocated"],
      chunks: [{ ...state, chunk: state.chunk || Model.data.colocated.budget }, "colocated"],
      split: [state, "split"],
    };
  }

  // Draws step by step: each `yield` lets the page answer. Returns what is drawn, for the CSV; `bounds`
  // adds those of the capacities.
  function* goodput(state) {
    const series = Object.entries(variants(state)).map(([key, [changed, architecture]]) => ({
      ...SERIES[key], key, changed, architecture, gpus: Model.gpus(state, architecture), points: [],
    }));
    for (const each of series) {
      each.capacity = (yield* Model.capacity(each.changed, each.architecture)).rate;
      each.capacities = [each.capacity];
      yield;
    }
    series[1].name = `co-located, chunks of ${number(series[1].changed.chunk, 5)}`;
    const top = 1.35 * Math.max(state.rate / 1.2, ...series.map((each) => each.capacity));
    for (let point = 1; point <= POINTS; point += 1) {
      const rate = (top * point) / POINTS;
      for (const { changed, architecture, points } of series) {
        const { share, keepsUp } = Model.attainment(changed, architecture, rate);
        points.push([rate, share, keepsUp]);
        yield;
      }
    }
    sayCapacities(series, state);
    plot(series, top, state);
    const table = document.getElementById("goodput-table");
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(row(["Requests/s", ...series.map((each) => each.name)], "th"));
    series[0].points.forEach(([rate], index) => {
      body.append(row([number(rate), ...series.map(({ points }) => kept(points[index]))]));
    });
    table.replaceChildren(head, body);
    return series;
  }

  const kept = ([, share, keepsUp]) => `${number(100 * share)} %${keepsUp ? "" : ", does not keep up"}`;

  // A capacity is exact to 5 %: two digits.
  const rough = (value) => number(value, 2);

  function sayCapacities(series, state) {
    const said = series.map(({ name, capacity, capacities, gpus }) => {
      const bounds = capacities.length > 1 ? range(Math.min(...capacities), Math.max(...capacities), rough) : "bounds follow";
      return `${name} ${rough(capacity)} requests/s (${bounds}), ${rough(capacity / gpus)} per GPU`;
    });
    document.getElementById("goodput-text").textContent =
      `Share of requests within the objective, by rate. With ${number(state.attainment)} % of them within it: ${said.join("; ")}.`;
  }

  function* bounds(series, state) {
    for (const each of series) {
      for (const efficiency of Model.ASSUMPTIONS.slice(1)) {
        each.capacities.push((yield* Model.capacity(each.changed, each.architecture, efficiency)).rate);
        yield;
      }
    }
    sayCapacities(series, state);
  }

  // Instead of the slow charts, why there are none.
  function refused(reason) {
    for (const id of ["goodput-text", "ratio-best"]) document.getElementById(id).textContent = reason;
    for (const id of ["goodput-plot", "goodput-legend", "goodput-table", "ratio-table"]) document.getElementById(id).replaceChildren();
  }

  function plot(series, top, state) {
    const holder = document.getElementById("goodput-plot");
    const width = Math.max(300, holder.clientWidth), height = 300, left = 44, bottom = 40;
    const x = (rate) => left + (rate / top) * (width - left - 14);
    const y = (share) => 14 + (1 - share) * (height - bottom - 14);
    const fixed = (value) => Number(value.toFixed(1));
    let lines = "";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      lines += `<line class="grid" x1="${left}" x2="${width - 14}" y1="${y(share)}" y2="${y(share)}"/>`;
      lines += `<text x="${left - 6}" y="${y(share) + 4}" text-anchor="end">${100 * share} %</text>`;
    }
    const step = Timeline.niceStep(top / (width < 500 ? 5 : 9));
    for (let rate = 0; rate <= top; rate += step) {
      lines += `<text x="${fixed(x(rate))}" y="${height - bottom + 20}" text-anchor="middle">${number(rate)}</text>`;
    }
    lines += `<text x="${(left + width) / 2}" y="${height - 4}" text-anchor="middle">requests/s</text>`;
    lines += `<line class="wanted" x1="${left}" x2="${width - 14}" y1="${y(state.attainment / 100)}" y2="${y(state.attainment / 100)}"/>`;
    lines += `<line class="now" x1="${fixed(x(state.rate))}" x2="${fixed(x(state.rate))}" y1="10" y2="${height - bottom}"/>`;
    for (const { colour, dash, mark, points } of series) {
      const path = points.map(([rate, share], index) => `${index ? "L" : "M"}${fixed(x(rate))} ${fixed(y(share))}`).join("");
      const marks = points.map(([rate, share]) => MARKS[mark](fixed(x(rate)), fixed(y(share)))).join("");
      const style = `stroke="var(${colour})" fill="none" stroke-width="2.5" stroke-dasharray="${dash}"`;
      lines += `<path d="${path}" ${style}/><g fill="var(${colour})">${marks}</g>`;
    }
    holder.innerHTML = `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">${lines}</svg>`;
    document.getElementById("goodput-legend").innerHTML = series.map(({ name, colour, dash, mark }) =>
      `<li><svg width="36" height="14" aria-hidden="true"><line x1="0" x2="36" y1="7" y2="7" stroke="var(${colour})" `
      + `stroke-width="2.5" stroke-dasharray="${dash}"/><g fill="var(${colour})">${MARKS[mark](18, 7)}</g></svg> ${name}</li>`,
    ).join("") + "<li>upright line: the rate of the settings</li><li>dotted line: the share that is wanted</li>";
  }

  // Of a cell, the role whose pods serve less binds. `choose(prefills, decodes)` is called when one is
  // pressed.
  function* ratio(state, choose) {
    const prefill = yield* Model.podCapacity(state, "prefills");
    yield;
    const decode = yield* Model.podCapacity(state, "decodes");
    yield;
    const together = (yield* Model.capacity(state, "colocated")).rate / Model.gpus(state, "colocated");
    const cells = numbers.flatMap((prefills) => numbers.map((decodes) => {
      const rates = [prefills * prefill.rate, decodes * decode.rate], rate = Math.min(...rates);
      const binds = rates[0] < rates[1] ? "prefill" : decode.binds === "prefill" ? "decode" : decode.binds;
      return { prefills, decodes, rate, binds, each: rate / Model.gpus({ prefills, decodes }, "split") };
    }));
    const most = Math.max(...cells.map(({ each }) => each)), best = cells.find(({ each }) => each === most);
    const body = document.createElement("tbody"), head = document.createElement("thead");
    head.append(row(["Pods", ...numbers.map((decodes) => `${decodes} decode`)], "th"));
    for (const prefills of numbers) {
      const line = row([`${prefills} prefill`]);
      for (const cell of cells.filter((each) => each.prefills === prefills)) {
        const holder = document.createElement("td");
        holder.append(ratioButton(cell, most, state, choose));
        line.append(holder);
      }
      body.append(line);
    }
    const table = document.getElementById("ratio-table"), focused = table.contains(document.activeElement) && document.activeElement.dataset.pods;
    table.replaceChildren(head, body);
    if (focused) table.querySelector(`[data-pods="${focused}"]`).focus({ preventScroll: true });
    const serves = ({ rate, isLeast }) => `${isLeast ? "at least " : ""}${rough(rate)}`;
    document.getElementById("ratio-best").textContent = most
      ? `One prefill pod serves ${serves(prefill)} requests/s, one decode pod ${serves(decode)}. Best of these: `
        + `${best.prefills} prefill and ${best.decodes} decode pods, ${rough(most)} requests/s per GPU; ${best.binds} binds. `
        + `Co-located pods as set: ${rough(together)} per GPU.`
      : `No number of these pods meets the objective. Co-located pods as set: ${rough(together)} requests/s per GPU.`;
    return cells;
  }

  function ratioButton({ prefills, decodes, each, binds }, most, state, choose) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `level-${most ? Math.round((4 * each) / most) : 0}`;
    button.dataset.pods = `${prefills}:${decodes}`;
    button.setAttribute("aria-pressed", String(prefills === state.prefills && decodes === state.decodes));
    button.setAttribute("aria-label", `${prefills} prefill, ${decodes} decode: ${rough(each)} requests per second and GPU, ${binds} binds`);
    button.innerHTML = `<strong>${rough(each)}</strong><span>${binds}</span>`;
    button.addEventListener("click", () => choose(prefills, decodes));
    return button;
  }

  // The requests that the timelines show, by both architectures.
  function requests(state, outcomes) {
    const [together, split] = ["colocated", "split"].map((name) => outcomes[name].run?.outcomes ?? []);
    const of = (list, index, name) => (list[index] ? seconds(Model.seen(list[index], state)[name]) : "–");
    const lines = (together.length ? together : split).flatMap(({ at, request }, index) => {
      if (at < state.from || at > state.from + state.span) return [];
      const figures = ["ttft", "itl"].flatMap((name) => [of(together, index, name), of(split, index, name)]);
      return [row([`${at.toFixed(2)} s`, number(request.prompt, 6), number(request.output, 6), ...figures])];
    });
    document.querySelector("#requests-table tbody").replaceChildren(...lines);
  }

  // fabrics.Verdict.
  function verdict(share) {
    return [[0.05, "negligible"], [0.25, "tolerable"], [0.5, "considerable"]].find(([most]) => share <= most)?.[1] ?? "too slow";
  }

  function network(state) {
    const { data } = Model, model = data.models[state.model] ?? data.models[0], unknown = Model.unknown(state.prompt);
    if (unknown) {
      document.getElementById("network-text").textContent = unknown;
      return document.querySelector("#network-table tbody").replaceChildren();
    }
    const size = Kernel.kvBytes(model.kv, state.prompt);
    const prefills = Model.ASSUMPTIONS.map((name) => Kernel.promptSeconds(model.steps[name], state.prompt, model.budget));
    const [prefill, shortest, longest] = prefills;
    const gigabits = (seconds) => (8 * size) / (0.5 * seconds) / 1e9;
    document.getElementById("network-text").textContent =
      `The KV of ${number(state.prompt, 6)} tokens of ${model.title} is ${bytes(size)}, as a decode pod reads it; `
      + `${model.tensor} × ${data.gpu} compute${model.tensor > 1 ? "" : "s"} the prompt in ${seconds(prefill)} (${range(shortest, longest, seconds)}). Below `
      + `${number(gigabits(prefill))} Gbit/s (${range(gigabits(longest), gigabits(shortest), number)}) the transfer takes more than half of that, and a split does not pay.`;
    const rows = model.fabrics.map(({ title, rates }) => [title, rates.assumed]);
    if (model === data.models[0]) rows.push(["as set", 1e9 * state.bandwidth]);
    const lines = rows.map(([title, rate]) => {
      const transfer = Kernel.transferSeconds({ latency: data.latency, perByte: 1 / rate }, size), share = transfer / prefill;
      return [title, `${number(rate / 1e9)} GB/s`, seconds(transfer), `${number(100 * share, 2)} %`, verdict(share)];
    });
    document.querySelector("#network-table tbody").replaceChildren(...lines.map((cells) => {
      const line = row(cells);
      line.lastChild.className = "prose";
      return line;
    }));
  }

  return { goodput, bounds, ratio, refused, network, requests, number, seconds, range, row };
})();
