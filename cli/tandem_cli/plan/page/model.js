// The state of the page, and what the simulation says of it. Nothing here draws.
//
//     Model.outcome(state, "split")       figures and bounds of an architecture, and its simulation
//     Model.capacity(state, architecture) highest rate that meets the objective, and what binds, step
//                                         by step: a generator, whose steps are simulations
"use strict";
const Model = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const WARM_UP = 0.2; // deployments.WARM_UP
  const GROWTH = 0.05; // search._GROWTH
  const EXACT = 1.05; // between the rates that a capacity lies between
  const SLOWEST = 0.001, FASTEST = 1e5; // requests/s
  const BEYOND = 1.25; // profile._BEYOND
  const LEAST = 400, MOST = 3000; // requests of a simulation
  const MANY = 16; // pods of the other role, so that only one binds
  const ASSUMPTIONS = ["assumed", "best", "worst"];
  const GPUS = data.prefill.tensor + data.decode.tensor;

  // Each control: where it starts and its bounds, which a start beyond them widens. `none`: 0 is no limit.
  const CONTROLS = {
    rate: { start: data.start.rate, min: 0.01, max: 1000, sliderMin: 0.1, sliderMax: 200, isLog: true },
    long: { start: 25, min: 0, max: 100, step: 1 },
    longTokens: { start: 3000, min: 300, max: 32000, sliderMax: 16000, step: 100 },
    outputTokens: { start: 100, min: 1, max: 4000, sliderMax: 1000, step: 1 },
    seed: { start: 1, min: 0, max: 999, sliderMax: 20, step: 1 },
    prefills: { start: data.start.prefills, min: 1, max: 64, sliderMax: 12, step: 1 },
    decodes: { start: data.start.decodes, min: 1, max: 64, sliderMax: 12, step: 1 },
    colocated: { start: data.start.colocated, min: 1, max: 128, sliderMax: 24, step: 1 },
    chunk: { start: data.colocated.budget, min: 0, max: 16384, sliderMax: 8192, step: 128 },
    bandwidth: { start: data.start.bandwidth, min: 0.05, max: 1000, isLog: true },
    streamed: { start: 0, min: 0, max: 100, step: 5 },
    ttft: { start: data.start.ttft ?? 0, min: 0.01, max: 120, sliderMax: 20, isLog: true, none: true },
    itl: { start: data.start.itl ?? 0, min: 1, max: 1000, isLog: true, none: true },
    e2e: { start: data.start.e2e ?? 0, min: 0.01, max: 3600, sliderMax: 600, isLog: true, none: true },
    attainment: { start: data.start.attainment, min: 1, max: 100, sliderMin: 50, step: 1 },
    from: { start: 2, min: 0, max: 100000, sliderMax: 20, step: 0.5 },
    span: { start: 4, min: 0.1, max: 1000, sliderMin: 0.5, sliderMax: 30, isLog: true },
    prompt: { start: 8192, min: 1, max: 1e6, sliderMin: 64, sliderMax: 131072, isLog: true },
    model: { start: 0, min: 0, max: data.models.length - 1, step: 1 },
  };
  for (const control of Object.values(CONTROLS)) {
    const { start, min, max, sliderMin = min, sliderMax = max, none } = control;
    if (none && !start) continue;
    Object.assign(control, {
      min: Math.min(min, start), max: Math.max(max, start),
      sliderMin: Math.min(sliderMin, start), sliderMax: Math.max(sliderMax, start),
    });
  }
  const WHOLE = new Set([
    "seed", "prefills", "decodes", "colocated", "longTokens", "outputTokens", "chunk", "prompt", "model",
  ]);

  function clamp(name, value) {
    const { min, max, start, none } = CONTROLS[name];
    if (!Number.isFinite(value)) return start;
    if (none && value === 0) return 0;
    const inside = Math.min(max, Math.max(min, value));
    // The smallest chunk that leaves room for decodes beside it; 0: whole prompts.
    if (name === "chunk" && inside > 0) return Math.max(128, Math.round(inside));
    return WHOLE.has(name) ? Math.round(inside) : inside;
  }

  function started() {
    return Object.fromEntries(Object.entries(CONTROLS).map(([name, each]) => [name, clamp(name, each.start)]));
  }

  // The state that a link has; what it does not say, or says wrongly, is as at the start.
  function parsed(hash) {
    const state = started();
    for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
      if (Object.hasOwn(CONTROLS, name) && text !== "") state[name] = clamp(name, Number(text));
    }
    return state;
  }

  function link(state) { return `#${new URLSearchParams(state)}`; }

  // The four experiments: all settings of the simulation. Co-located pods compute whole prompts. The
  // rate follows the model's speed.
  function experiment(changes) {
    const { from, span, prompt, model, ...settings } = started();
    const colocated = Math.max(1, Math.round(GPUS / data.colocated.tensor));
    const bandwidth = fabric("NVLink");
    return { ...settings, rate: data.experimentRate, prefills: 1, decodes: 1, colocated, chunk: 0, bandwidth, ...changes };
  }
  function fabric(title) {
    const found = data.fabrics.find((each) => each.title === title) ?? data.fabrics[0];
    return Number((found.rates.assumed / 1e9).toPrecision(4));
  }
  const EXPERIMENTS = {
    default: experiment({}),
    pcie: experiment({ bandwidth: fabric("PCIe") }),
    short: experiment({ long: 0, bandwidth: fabric("PCIe") }),
    long: experiment({ long: 60 }),
  };

  function pool(kind, replicas, efficiency, changes = {}) {
    const { budget, requests, tokens } = kind;
    return { replicas, step: kind.steps[efficiency], budget, requests, tokens, isChunked: true, ...changes };
  }

  function deployment(state, architecture, efficiency = "assumed") {
    if (architecture === "colocated") {
      const budget = state.chunk || 8192;
      const changes = { budget, isChunked: state.chunk > 0 };
      return { prefill: null, decode: pool(data.colocated, state.colocated, efficiency, changes), link: null };
    }
    const { rates } = data.fabrics[0];
    const perByte = 1 / (1e9 * state.bandwidth * (rates[efficiency] / rates.assumed));
    return {
      prefill: pool(data.prefill, state.prefills, efficiency),
      decode: pool(data.decode, state.decodes, efficiency),
      link: { latency: data.latency, perByte, kv: data.kv, streamed: state.streamed / 100 },
    };
  }

  function gpus(state, architecture) {
    if (architecture === "colocated") return state.colocated * data.colocated.tensor;
    return state.prefills * data.prefill.tensor + state.decodes * data.decode.tensor;
  }

  // Half a minute of requests: queues of pods that do not keep up have grown by then. Fewer where a
  // prompt takes many steps, so that the page answers.
  function workload(state) {
    const { seed, rate, longTokens, outputTokens } = state;
    const steps = state.chunk ? 1 + (longTokens * state.long) / 100 / state.chunk : 1;
    const most = Math.max(LEAST / 4, Math.min(MOST, Math.floor(MOST * 8 / steps)));
    const count = Math.min(most, Math.max(LEAST, Math.ceil(30 * rate)));
    return Kernel.workload({ seed, rate, long: state.long / 100, longTokens, outputTokens, count });
  }

  // The percentile of sorted values, linear between ranks: measures.percentile.
  function percentile(sorted, percent) {
    const rank = ((sorted.length - 1) * percent) / 100, low = Math.floor(rank), high = Math.ceil(rank);
    return Math.min(sorted[high], sorted[low] + (sorted[high] - sorted[low]) * (rank - low));
  }

  // A percentile of all gaps between two tokens: measures.Result.gap_percentile.
  function gapPercentile(pods, percent) {
    const gaps = pods.flatMap((pod) => pod.gaps).sort((a, b) => a[0] - b[0]);
    let left = (gaps.reduce((sum, gap) => sum + gap[1], 0) * percent) / 100;
    for (const [seconds, count] of gaps) if ((left -= count) <= 0) return seconds;
    return 0;
  }

  // What a client saw of one request.
  function seen(outcome, state) {
    const decode = outcome.answer ?? outcome.work;
    const ttft = outcome.first - outcome.at + data.request, e2e = outcome.ended - outcome.at + data.request;
    const itl = outcome.request.output < 2 ? 0 : (decode.ended - decode.first) / (outcome.request.output - 1);
    const isLate = state.ttft > 0 && ttft > state.ttft, isSlow = state.itl > 0 && itl > state.itl / 1000;
    const isOver = state.e2e > 0 && e2e > state.e2e;
    return { ttft, itl, e2e, isLate, isSlow, isOver, isMet: !isLate && !isSlow && !isOver };
  }

  const sorted = (values) => values.sort((a, b) => a - b);

  function measured(run, state) {
    const { outcomes, pods } = run, grown = growth(run);
    const requests = outcomes.slice(Math.floor(WARM_UP * outcomes.length)).map((each) => seen(each, state));
    const ttfts = sorted(requests.map((each) => each.ttft)), e2es = sorted(requests.map((each) => each.e2e));
    const itls = sorted(requests.map((each) => each.itl).filter((itl) => itl > 0));
    const met = requests.filter((each) => each.isMet).length / requests.length;
    return {
      ttft50: percentile(ttfts, 50), ttft99: percentile(ttfts, 99),
      itl50: itls.length ? percentile(itls, 50) : 0, itl99: itls.length ? percentile(itls, 99) : 0,
      gap99: gapPercentile(pods, 99),
      e2eMean: e2es.reduce((sum, each) => sum + each, 0) / e2es.length, e2e99: percentile(e2es, 99),
      attainment: met, growth: grown, goodput: grown > GROWTH ? 0 : met * state.rate,
    };
  }

  // Beyond what a profile measured, its steps are not known: why, or nothing. FittedEngine.unknown.
  function unknown(tokens) {
    if (!data.longest || tokens <= BEYOND * data.longest) return "";
    const [longest, most] = [tokens, data.longest].map((each) => each.toLocaleString("en"));
    return `Unknown: prompts of ${longest} tokens, and the profile has none above ${most}: measure with tandem profile --longest ${tokens}.`;
  }

  // Tokens that no prompt of the workload exceeds.
  function longestPrompt({ long, longTokens }) { return long ? Math.max(200, 2 * Math.max(1, Math.floor((2 * longTokens) / 3))) : 200; }

  // Seconds that TTFT grows by in a second, from the first third to the last: measures.Result.growth.
  function growth({ outcomes }) {
    const third = Math.floor(outcomes.length / 3), mean = (list, value) => list.reduce((sum, each) => sum + value(each), 0) / third;
    const first = outcomes.slice(0, third), last = outcomes.slice(-third), ttft = (each) => each.first - each.at;
    const between = third ? mean(last, ({ at }) => at) - mean(first, ({ at }) => at) : 0;
    return between > 0 ? (mean(last, ttft) - mean(first, ttft)) / between : 0;
  }

  // An architecture under all three assumptions; {error} if a prompt does not fit.
  function outcome(state, architecture) {
    try {
      const requests = workload(state);
      const runs = ASSUMPTIONS.map((name) => Kernel.simulate(deployment(state, architecture, name), requests));
      const [assumed, best, worst] = runs.map((run) => measured(run, state));
      const figures = Object.fromEntries(Object.keys(assumed).map((name) => {
        const values = [assumed[name], best[name], worst[name]];
        return [name, { value: values[0], low: Math.min(...values), high: Math.max(...values), values }];
      }));
      const keepsUp = figures.growth.value <= GROWTH;
      return { architecture, figures, keepsUp, run: runs[0], gpus: gpus(state, architecture) };
    } catch (error) {
      return { architecture, error: error.message, gpus: gpus(state, architecture) };
    }
  }

  // Share of requests within the objective at a rate, and the simulation.
  function attainment(state, architecture, rate, efficiency = "assumed") {
    const changed = { ...state, rate };
    const run = Kernel.simulate(deployment(changed, architecture, efficiency), workload(changed));
    const found = measured(run, changed);
    return { share: found.attainment, keepsUp: found.growth <= GROWTH, run };
  }

  // What most requests miss because of: the longest part of late ones, or decode steps.
  function binding(run, state) {
    const causes = { prefill: 0, memory: 0, network: 0, decode: 0 };
    for (const outcome of run.outcomes) {
      const { isLate, isSlow, isOver } = seen(outcome, state);
      if (isSlow) causes.decode += 1;
      if (!isLate && !isOver) continue;
      const { work, answer } = outcome, until = isOver ? outcome.ended : outcome.first;
      const parts = answer
        ? {
            prefill: work.first - outcome.at, memory: answer.reserved - answer.arrived,
            network: answer.started - answer.reserved, decode: until - answer.started,
          }
        : { prefill: outcome.first - work.started, memory: work.started - outcome.at, decode: until - outcome.first };
      causes[Object.keys(parts).reduce((a, b) => (parts[b] > parts[a] ? b : a))] += 1;
    }
    return Object.keys(causes).reduce((a, b) => (causes[b] > causes[a] ? b : a));
  }

  // Highest rate at which the wanted share is within the objective and the pods keep up, 0 for none;
  // a rate a little above it at which not, and what binds there. As Search._highest.
  function* capacity(state, architecture, efficiency = "assumed") {
    const at = (rate) => {
      const { share, keepsUp, run } = attainment(state, architecture, rate, efficiency);
      return { run, isMet: share >= state.attainment / 100 && keepsUp };
    };
    let low = 0, high = (data.experimentRate * gpus(state, architecture)) / GPUS, above = at(high);
    while (above.isMet && high < FASTEST) {
      yield;
      low = high;
      above = at((high *= 2));
    }
    if (above.isMet) return { rate: high, above: Infinity, binds: "none" };
    if (!low) {
      yield;
      const slowest = at(SLOWEST);
      if (!slowest.isMet) return { rate: 0, above: SLOWEST, binds: binding(slowest.run, { ...state, rate: SLOWEST }) };
      low = SLOWEST;
    }
    while (high / low > EXACT) {
      yield;
      const middle = Math.sqrt(low * high), found = at(middle);
      if (found.isMet) low = middle;
      else [high, above] = [middle, found];
    }
    return { rate: low, above: high, binds: binding(above.run, { ...state, rate: high }) };
  }

  // What one pod of a role serves while there are many of the other; `isLeast` if those bind even so.
  function* podCapacity(state, role) {
    const pods = { prefills: MANY, decodes: MANY, [role]: 1 };
    const found = yield* capacity({ ...state, ...pods }, "split");
    const isLeast = found.above === Infinity || (found.rate > 0 && (found.binds === "prefill") !== (role === "prefills"));
    return { ...found, isLeast };
  }

  return {
    data, ASSUMPTIONS, CONTROLS, EXPERIMENTS, clamp, started, parsed, link, fabric, outcome, attainment, capacity, podCapacity,
    gpus, seen, unknown, longestPrompt, deployment,
  };
})();
