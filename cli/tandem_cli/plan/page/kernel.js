// The simulation of tandem_planner.simulation, without prefix caches, external storage and noise:
// co-located pods or prefill and decode pods, one fabric, KV reserved before a transfer.
//
//     const served = Kernel.simulate(deployment, Kernel.workload(settings));
//
// Every sum is in the order of the Python code, so both give the same figures:
// tests/cli/plan/page/test_kernel.py compares them. Times are seconds, lengths tokens.
"use strict";
const Kernel = (() => {
  const BLOCK = 512; // tokens: block_pool.BLOCK
  const PROMPT_WEIGHT = 50; // routers._PROMPT_WEIGHT
  const HANDOFF_SECONDS = 0.01; // cost.HANDOFF_SECONDS
  const END = 1e12; // later than any request ends

  // A binary heap of {key, tie, value}; ties are unique, so the order is total.
  class Heap {
    items = [];
    get size() { return this.items.length; }
    get first() { return this.items[0]; }
    push(key, tie, value) {
      const items = this.items;
      let at = items.push({ key, tie, value }) - 1;
      while (at > 0 && Heap.before(items[at], items[(at - 1) >> 1])) at = this.swap(at, (at - 1) >> 1);
    }
    pop() {
      const items = this.items, first = items[0], last = items.pop();
      if (items.length) {
        items[0] = last;
        for (let at = 0; ;) {
          let least = at;
          for (const child of [2 * at + 1, 2 * at + 2]) {
            if (child < items.length && Heap.before(items[child], items[least])) least = child;
          }
          if (least === at) break;
          at = this.swap(at, least);
        }
      }
      return first;
    }
    remove(value) {
      const rest = this.items.filter((item) => item.value !== value);
      this.items = [];
      rest.forEach((item) => this.push(item.key, item.tie, item.value));
    }
    swap(at, other) {
      const items = this.items, item = items[at];
      items[at] = items[other];
      items[other] = item;
      return other;
    }
    static before(a, b) { return a.key < b.key || (a.key === b.key && a.tie < b.tie); }
  }

  // `step_cost.LinearStep`: [fixed, per decode, per KV token, per prompt token, per pair], or the
  // coefficients of a roofline.
  function stepSeconds(step, decodes, context, tokens = 0, looks = 0) {
    if (!Array.isArray(step)) return rooflineSeconds(step, decodes, context, tokens, looks);
    return step[0] + step[1] * decodes + step[2] * context + step[3] * tokens + step[4] * looks;
  }

  // `roofline.RooflineStep`.
  function rooflineSeconds(step, decodes, context, tokens, looks) {
    const rows = decodes + tokens;
    let reading = step.reading;
    if (step.experts) reading += step.experts * (1 - step.missed ** Math.max(1, rows));
    const computing = step.perRow * rows + step.last * Math.min(rows, decodes + 1);
    let seconds = step.overhead + step.perRequest * decodes + Math.max(computing, reading);
    seconds += step.exchange + step.exchangeRow * rows;
    if (decodes > 0) seconds += decodes * kvBytes(step.kv, context / decodes);
    if (tokens > 0) {
      const near = step.window ? Math.min(looks, tokens * step.window) : looks;
      seconds += step.perPair * looks + step.perNearPair * near;
    }
    return seconds;
  }

  function pairs(start, end) { return (end - start) * (start + end); }

  // `step_cost.prompt_seconds`: a prompt on an idle pod, in steps of at most `budget` tokens.
  function promptSeconds(step, tokens, budget) {
    let seconds = 0;
    for (let at = 0; at < tokens; at += budget) {
      const end = Math.min(at + budget, tokens);
      seconds += stepSeconds(step, 0, 0, end - at, pairs(at, end));
    }
    return seconds;
  }

  // `kv_size.KvSize`: [bytes per token, bytes of all windows, bytes per token beyond, or null].
  function kvBytes(size, tokens) {
    const [short, windows, long] = size;
    return long === null ? short * tokens : Math.min(short * tokens, windows + long * tokens);
  }

  // `transfer.TransferCost`.
  function transferSeconds(link, bytes) {
    return bytes > 0 ? link.latency + link.perByte * bytes : 0;
  }

  // `link.Link`: the receiving end of one pod.
  class Link {
    busy = 0;
    freeAt = 0;
    transfers = [];
    constructor(link) { this.link = link; }
    receive(work, tokens, now) {
      const seconds = transferSeconds(this.link, kvBytes(this.link.kv, tokens));
      const ahead = Math.min(seconds * this.link.streamed, work.prefillSeconds);
      const start = Math.max(now, this.freeAt);
      this.freeAt = start + seconds - ahead;
      this.busy += seconds;
      this.transfers.push({ start, end: this.freeAt, index: work.index });
      return this.freeAt;
    }
  }

  function newWork(index, arrived, prompt, output) {
    return {
      index, arrived, prompt, output, isRemote: false, prefillSeconds: 0, started: null,
      reserved: null, first: null, ended: null, preemptions: 0, done: 0, length: 0, generated: 0,
      joined: 0, loaded: 0,
    };
  }

  // Tokens to compute before the next token of the answer; the last one has no KV yet.
  function totalTokens(work) { return work.prompt + Math.max(0, work.generated - 1); }

  // `engine.Engine`: one pod.
  class Engine {
    waiting = [];
    loading = new Heap();
    prefilling = [];
    decoding = [];
    gaps = [];
    stalled = 0;
    stalledDecodes = 0;
    busy = 0;
    context = 0;
    preemptions = 0;
    used = 0; // tokens of KV
    ends = new Heap();
    steps = 0;
    clock = 0;
    segments = [];

    constructor(pool, link) {
      this.pool = pool;
      this.link = link ? new Link(link) : null;
    }
    get running() { return this.loading.size + this.prefilling.length + this.decoding.length; }
    decodeStepSeconds() { return stepSeconds(this.pool.step, this.decoding.length, this.context); }

    add(work) {
      if (!this.running && !this.waiting.length) this.clock = Math.max(this.clock, work.arrived);
      this.waiting.push(work);
    }

    // Simulates all steps that begin before `until`; appends what happened to `changes`.
    advance(until, changes) {
      while (this.clock < until && (this.running || this.waiting.length)) {
        this.endLoads();
        if (this.prefilling.length || (this.waiting.length && this.canAdmit(this.waiting[0]))) {
          this.mixedStep(changes);
        } else if (this.decoding.length) {
          this.decodeSteps(this.loading.size ? Math.min(until, this.loading.first.key) : until, changes);
        } else if (this.loading.size) {
          this.clock = this.loading.first.key;
        } else {
          throw new Error("a prompt is larger than the KV cache of its pod");
        }
      }
    }

    quietUntil() {
      if (this.waiting.length || this.prefilling.length || this.loading.size) return this.clock;
      if (!this.decoding.length) return Infinity;
      return this.clock + (this.ends.first.key - this.steps) * this.decodeStepSeconds();
    }

    hasRoom(tokens) { return this.used + tokens <= this.pool.tokens; }

    canAdmit(work) {
      if (this.running >= this.pool.requests) return false;
      const reserve = this.running ? BLOCK + Math.floor(this.pool.tokens / 100) : 0;
      return this.hasRoom(totalTokens(work) + reserve);
    }

    // The request gets its blocks, and is computed or waits for KV first; whether it is.
    admit(work) {
      if (work.started === null) work.started = this.clock;
      work.done = 0;
      work.length = totalTokens(work);
      this.used += work.length;
      if (!work.isRemote) {
        this.prefilling.push(work);
        return true;
      }
      work.reserved = this.clock;
      work.loaded = work.prompt - 1;
      this.loading.push(this.link.receive(work, work.prompt, this.clock), work.index, work);
      return false;
    }

    endLoads() {
      while (this.loading.size && this.loading.first.key <= this.clock) {
        const work = this.loading.pop().value;
        work.done += work.loaded;
        work.started = this.clock;
        this.prefilling.push(work);
      }
    }

    // A step with prompts; without chunks no decode is in it.
    mixedStep(changes) {
      const isChunked = this.pool.isChunked;
      const decodes = isChunked ? this.decoding.length : 0, context = isChunked ? this.context : 0;
      const room = this.pool.budget - decodes, completed = [];
      let tokens = 0, looks = 0;
      const take = (work) => {
        const from = work.done, chunk = this.chunk(work, room - tokens);
        tokens += chunk;
        looks += pairs(from, from + chunk);
        if (work.done >= work.length) completed.push(work);
      };
      this.prefilling.forEach(take);
      while (this.waiting.length && this.isNext(this.waiting[0], tokens, room)) {
        const work = this.waiting.shift();
        if (this.admit(work)) take(work);
      }
      if (!tokens && !decodes) return; // all that was admitted waits for KV
      const seconds = stepSeconds(this.pool.step, decodes, context, tokens, looks);
      this.finishSteps(isChunked ? 1 : 0, seconds, tokens, changes);
      for (const work of completed) {
        // A request whose blocks ran out at this very step is in the queue again.
        const at = this.prefilling.indexOf(work);
        if (at >= 0) {
          this.prefilling.splice(at, 1);
          this.joinDecodes(work, changes);
        }
      }
    }

    isNext(work, tokens, room) {
      if (!this.pool.isChunked && tokens) return tokens + work.prompt <= room && this.canAdmit(work);
      return tokens < room && this.canAdmit(work);
    }

    chunk(work, room) {
      const left = work.length - work.done;
      const chunk = Math.max(0, this.pool.isChunked ? Math.min(room, left) : left);
      work.done += chunk;
      return chunk;
    }

    joinDecodes(work, changes) {
      work.generated += 1;
      work.joined = this.steps;
      if (work.first === null) {
        work.first = this.clock;
        changes.push({ time: this.clock, isEnd: false, work });
      }
      this.decoding.push(work);
      this.context += work.length;
      this.ends.push(this.steps + work.output - work.generated, work.index, work);
      this.endCompleted(changes);
    }

    // As many steps at once as nothing changes in: until an answer ends, or `until`.
    decodeSteps(until, changes) {
      const decodes = this.decoding.length, most = this.ends.first.key - this.steps;
      const fitting = Math.trunc((until - this.clock) / this.decodeStepSeconds()) + 1;
      const steps = Math.max(1, Math.min(most, fitting));
      // Each step reads a token more of each decode: on average, half of what the last one does.
      const context = this.context + (decodes * (steps - 1)) / 2;
      this.finishSteps(steps, steps * stepSeconds(this.pool.step, decodes, context), 0, changes);
    }

    finishSteps(steps, seconds, prompt, changes) {
      const start = this.clock, decodes = this.decoding.length;
      this.clock += seconds;
      this.busy += seconds;
      this.segments.push({ start, end: this.clock, prompt, decodes, steps });
      if (!steps && decodes) {
        this.stalledDecodes = decodes;
        this.stalled += seconds;
      }
      this.steps += steps;
      if (!decodes) return;
      if (steps) this.countTokens(steps, seconds);
      this.endCompleted(changes);
      // What is being loaded keeps its blocks.
      while (!this.hasRoom(0) && this.prefilling.length + this.decoding.length > 1) this.preempt();
    }

    countTokens(steps, seconds) {
      const decodes = this.decoding.length, gap = seconds / steps, tokens = steps * decodes;
      if (this.stalled) {
        const stalled = Math.min(this.stalledDecodes, decodes);
        this.gaps.push([gap + this.stalled, stalled], [gap, tokens - stalled]);
        this.stalled = 0;
      } else {
        this.gaps.push([gap, tokens]);
      }
      this.context += tokens;
      this.used += tokens;
    }

    endCompleted(changes) {
      while (this.ends.size && this.ends.first.key <= this.steps) {
        const work = this.ends.pop().value;
        this.leave(work);
        work.ended = this.clock;
        changes.push({ time: this.clock, isEnd: true, work });
      }
    }

    leave(work) {
      this.decoding.splice(this.decoding.indexOf(work), 1);
      const generated = this.steps - work.joined;
      work.generated += generated;
      this.context -= work.length + generated;
      this.used -= work.length + generated;
    }

    // Stops the request that was admitted last; it is computed again, answer included.
    preempt() {
      let work;
      if (this.prefilling.length) {
        work = this.prefilling.pop();
        this.used -= work.length;
      } else {
        work = this.decoding[this.decoding.length - 1];
        this.leave(work);
        this.ends.remove(work);
      }
      work.preemptions += 1;
      work.isRemote = false;
      this.preemptions += 1;
      this.waiting.unshift(work);
    }
  }

  // `routers.LeastWork`: the pod with the least to do, of equal ones the first.
  function leastOf(pods, tokens) {
    return pods.reduce((best, pod) => (tokens[pod] < tokens[best] ? pod : best));
  }

  // `loop.Simulation`, lazy, with a router that takes no time (AT_ONCE).
  class Simulation {
    constructor({ prefill, decode, link }) {
      const pool = (spec, ends) => Array.from({ length: spec ? spec.replicas : 0 }, () => new Engine(spec, ends));
      const senders = pool(prefill, null);
      this.pods = [...senders, ...pool(decode, prefill ? link : null)];
      const numbers = this.pods.map((_, number) => number);
      this.prefills = numbers.slice(0, senders.length);
      this.decodes = numbers.slice(senders.length);
      this.order = [this.prefills, this.decodes].filter((pods) => pods.length);
      this.quiet = numbers.map(() => 0);
      this.tokens = numbers.map(() => 0);
      this.later = new Heap();
      this.number = 0;
      this.outcomes = [];
    }

    run(requests) {
      let unfinished = requests.length;
      for (const request of requests) this.at(request.at, { arrival: request });
      while (unfinished) {
        this.order.forEach((pods) => this.advanceToNext(pods));
        const { key: now, value: event } = this.later.pop();
        if (event.arrival) this.place(event.arrival, now);
        else if (event.handoff) this.add(event.handoff.decode, event.handoff.answer);
        else if (this.onChange(event, now)) unfinished -= 1;
      }
      return { outcomes: this.outcomes, pods: this.pods, prefills: this.prefills, decodes: this.decodes };
    }

    at(time, event) { this.later.push(time, this.number++, event); }

    advanceToNext(pods) {
      const next = this.later.first, until = next ? next.key : END;
      if (next && next.value.work) return; // the router hears of it, and looks at no pod
      for (const pod of pods) if (this.quiet[pod] <= until) this.advance(pod, until);
    }

    advance(pod, until) {
      const changes = [];
      this.pods[pod].advance(until, changes);
      changes.forEach((change) => this.at(change.time, change));
      this.quiet[pod] = this.pods[pod].quietUntil();
    }

    add(pod, work) {
      this.advance(pod, work.arrived);
      this.pods[pod].add(work);
      this.quiet[pod] = 0;
    }

    place(request, now) {
      const work = newWork(this.outcomes.length, now, request.prompt, request.output);
      const computing = leastOf(this.prefills.length ? this.prefills : this.decodes, this.tokens);
      this.tokens[computing] += PROMPT_WEIGHT * request.prompt;
      const decode = this.prefills.length ? leastOf(this.decodes, this.tokens) : computing;
      this.tokens[decode] += request.prompt + request.output;
      const outcome = { at: request.at, request, work, computing, decode, answer: null, first: null, ended: null };
      this.outcomes.push(outcome);
      if (this.prefills.length) {
        outcome.answer = newWork(work.index, now, request.prompt, request.output);
        work.output = 1; // the prefill leg generates one token
      }
      this.add(computing, work);
    }

    // Whether a request has ended.
    onChange({ isEnd, work }, now) {
      const outcome = this.outcomes[work.index], { answer, request } = outcome;
      if (answer !== null && work !== answer) {
        if (!isEnd) {
          this.tokens[outcome.computing] -= PROMPT_WEIGHT * request.prompt;
          answer.arrived = now + HANDOFF_SECONDS;
          answer.isRemote = true;
          answer.prefillSeconds = now - work.started;
          this.at(answer.arrived, { handoff: outcome });
        }
        return false;
      }
      if (!isEnd) {
        outcome.first = now;
        if (answer === null) this.tokens[outcome.computing] -= PROMPT_WEIGHT * request.prompt;
        return false;
      }
      outcome.ended = now;
      this.tokens[outcome.decode] -= request.prompt + request.output;
      return true;
    }
  }

  // deployment: {prefill: pool or null, decode: pool, link: {latency, perByte, kv, streamed}}
  // pool: {replicas, step, budget, requests, isChunked, tokens}
  function simulate(deployment, requests) { return new Simulation(deployment).run(requests); }

  // Numbers in [0, 1) from 32 bits (Mulberry32, Tommy Ettinger, public domain).
  function uniforms(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let bits = Math.imul(state ^ (state >>> 15), state | 1);
      bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
      return ((bits ^ (bits >>> 14)) >>> 0) / 4294967296;
    };
  }

  // An exponential variate with mean 1 by comparisons alone (von Neumann, 1951): no logarithm,
  // whose last bit would depend on the library.
  function exponential(uniform) {
    for (let whole = 0; ; whole += 1) {
      const first = uniform();
      let count = 1;
      for (let last = first, next = uniform(); next < last; last = next, next = uniform()) count += 1;
      if (count % 2) return whole + first;
    }
  }

  // Poisson arrivals; prompts of 50 to 200 tokens, or, a share `long` of them, of 2/3 to 4/3 of
  // `longTokens`; answers of 1/2 to 3/2 of `outputTokens`. Lengths do not depend on the rate.
  function workload({ seed, rate, long, longTokens, outputTokens, count }) {
    const gaps = uniforms(seed), lengths = uniforms(seed ^ 0x9e3779b9), requests = [];
    const least = Math.max(1, Math.floor((2 * longTokens) / 3)), half = Math.floor(outputTokens / 2);
    for (let index = 0, at = 0; index < count; index += 1) {
      at += exponential(gaps) / rate;
      const isLong = lengths() < long, length = lengths(), answer = lengths();
      requests.push({
        at,
        isLong,
        prompt: isLong ? least + Math.floor(length * (least + 1)) : 50 + Math.floor(length * 151),
        output: Math.max(1, half + Math.floor(answer * (2 * half + 1))),
      });
    }
    return requests;
  }

  return { simulate, workload, promptSeconds, stepSeconds, kvBytes, transferSeconds };
})();
