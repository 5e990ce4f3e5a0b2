// The timeline of one architecture on a canvas: arrivals, and two tracks for each pod, prefill above
// decode. A pattern goes with each colour.
"use strict";
const Timeline = (() => {
  const LABEL = 18, TRACK = 17, LINK = 10, ARRIVALS = 20, AXIS = 22, SPACE = 6, LEFT = 4;
  const FONT = "12px system-ui, sans-serif";
  const KINDS = {
    prefill: { colour: "--series-2", pattern: "lines" },
    decode: { colour: "--series-1", pattern: "none" },
    waiting: { colour: "--bad", pattern: "cross" },
    transfer: { colour: "--series-3", pattern: "dots" },
  };

  // A square of 8 pixels with the pattern in the colour of the panel.
  function fill(context, kind) {
    const { colour, pattern } = KINDS[kind];
    const tile = document.createElement("canvas"), pen = tile.getContext("2d");
    tile.width = tile.height = 8;
    pen.fillStyle = Theme.colour(colour);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = pen.fillStyle = Theme.colour("--panel");
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (pattern === "lines" || pattern === "cross") {
      for (const x of [-8, 0, 8]) pen.moveTo(x - 1, 9), pen.lineTo(x + 9, -1);
    }
    if (pattern === "cross") for (const x of [-8, 0, 8]) pen.moveTo(x - 1, -1), pen.lineTo(x + 9, 9);
    pen.stroke();
    if (pattern === "dots") pen.fillRect(2, 2, 3, 3);
    return context.createPattern(tile, "repeat");
  }

  function lanes({ run, architecture }) {
    const names = architecture === "colocated"
      ? run.pods.map((_, number) => `pod ${number + 1}`)
      : run.pods.map((_, number) => (number < run.prefills.length
        ? `prefill pod ${number + 1}` : `decode pod ${number + 1 - run.prefills.length}`));
    return run.pods.map((pod, number) => {
      const hasPrefill = architecture === "colocated" || number < run.prefills.length;
      const hasDecode = architecture === "colocated" || number >= run.prefills.length;
      const height = LABEL + (hasPrefill ? TRACK : 0) + (hasDecode ? TRACK : 0) + (pod.link ? LINK : 0) + SPACE;
      return { name: names[number], pod, hasPrefill, hasDecode, height };
    });
  }

  // Segments of a sorted list that overlap [from, to).
  function* within(list, from, to) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle].end <= from) low = middle + 1;
      else high = middle;
    }
    for (let at = low; at < list.length && list[at].start < to; at += 1) yield list[at];
  }

  function draw(canvas, outcome, state) {
    const rows = lanes(outcome), { from, span } = state, to = from + span;
    const width = canvas.parentElement.clientWidth;
    const height = LABEL + ARRIVALS + rows.reduce((sum, row) => sum + row.height, 0) + AXIS;
    const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    pen.scale(ratio, ratio);
    pen.fillStyle = Theme.colour("--panel");
    pen.fillRect(0, 0, width, height);
    pen.font = FONT;
    const x = (time) => LEFT + ((time - from) / span) * (width - 2 * LEFT);
    const fills = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, fill(pen, kind)]));
    const bar = (kind, start, end, top, tall) => {
      const left = Math.max(LEFT, x(start)), right = Math.min(width - LEFT, x(end));
      pen.fillStyle = fills[kind];
      pen.fillRect(left, top, Math.max(0.6, right - left), tall);
    };
    axis(pen, x, from, span, height, width);
    arrivals(pen, x, outcome, state, to);
    let top = LABEL + ARRIVALS;
    for (const row of rows) {
      label(pen, row.name, top);
      top += LABEL;
      track(pen, width, top, row);
      steps(row, from, to, top, bar);
      top += (row.hasPrefill ? TRACK : 0) + (row.hasDecode ? TRACK : 0);
      if (row.pod.link) {
        for (const { start, end } of within(row.pod.link.transfers, from, to)) bar("transfer", start, end, top, LINK - 2);
        top += LINK;
      }
      top += SPACE;
    }
  }

  // Where there is nothing to draw.
  function clear(canvas) {
    canvas.width = canvas.height = 0;
    canvas.style.height = "0";
  }

  function label(pen, text, top) {
    pen.fillStyle = Theme.colour("--muted");
    pen.textAlign = "left";
    pen.fillText(text, LEFT, top + LABEL - 5);
  }

  function track(pen, width, top, { hasPrefill, hasDecode }) {
    pen.fillStyle = Theme.colour("--grid");
    pen.fillRect(LEFT, top, width - 2 * LEFT, ((hasPrefill ? TRACK : 0) + (hasDecode ? TRACK : 0)) - 1);
  }

  // Decodes are as high as there are many of them, up to 32.
  function steps({ pod, hasPrefill, hasDecode }, from, to, top, bar) {
    const below = top + (hasPrefill ? TRACK : 0), segments = [...within(pod.segments, from, to)];
    const prefills = segments.filter(({ prompt }) => prompt && hasPrefill);
    for (const { start, end } of merged(prefills, () => "")) bar("prefill", start, end, top, TRACK - 1);
    const tall = ({ decodes }) => Math.round((TRACK - 1) * (0.4 + 0.6 * Math.min(1, decodes / 32)));
    const kind = ({ steps: count }) => (count ? "decode" : "waiting");
    const answers = segments.filter(({ decodes }) => decodes && hasDecode);
    for (const each of merged(answers, (segment) => kind(segment) + tall(segment))) {
      bar(kind(each), each.start, each.end, below + TRACK - 1 - tall(each), tall(each));
    }
  }

  // Neighbours that look alike as one: no seams between them.
  function merged(segments, look) {
    const result = [];
    for (const segment of segments) {
      const last = result.at(-1);
      if (last && last.end === segment.start && look(last) === look(segment)) last.end = segment.end;
      else result.push({ ...segment });
    }
    return result;
  }

  // A short line for a short prompt, a triangle for a long one; in the colour of errors, and with a
  // bar above, if the request misses the objective.
  function arrivals(pen, x, { run }, state, to) {
    label(pen, "arrivals", 0);
    for (const outcome of run.outcomes) {
      if (outcome.at < state.from || outcome.at > to) continue;
      const { isMet } = Model.seen(outcome, state), at = x(outcome.at), bottom = LABEL + ARRIVALS - 5;
      pen.fillStyle = Theme.colour(isMet ? "--ink" : "--bad");
      if (outcome.request.isLong) {
        pen.beginPath();
        pen.moveTo(at - 5, bottom - 10);
        pen.lineTo(at + 5, bottom - 10);
        pen.lineTo(at, bottom);
        pen.fill();
      } else {
        pen.fillRect(at - 0.75, bottom - 8, 1.5, 8);
      }
      if (!isMet) pen.fillRect(at - 5, bottom - 14, 10, 2);
    }
  }

  // The least of 1, 2, 5, 10, … that is at least `rough`.
  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  }

  function axis(pen, x, from, span, height, width) {
    const step = niceStep(span / Math.max(2, Math.floor(width / 90)));
    pen.fillStyle = Theme.colour("--muted");
    for (let time = Math.ceil(from / step - 1e-9) * step; time <= from + span + 1e-9; time += step) {
      const at = x(time), text = `${Number(time.toFixed(3))} s`;
      pen.fillStyle = Theme.colour("--line");
      pen.fillRect(at - 0.5, LABEL, 1, height - AXIS - LABEL + 4);
      pen.fillStyle = Theme.colour("--muted");
      pen.textAlign = at > width - 30 ? "right" : at < 30 ? "left" : "center";
      pen.fillText(text, at, height - 5);
    }
  }

  // The keys of the legend, drawn as in the timeline.
  function legend(canvas) {
    const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = 28 * ratio;
    canvas.height = 14 * ratio;
    pen.scale(ratio, ratio);
    pen.fillStyle = fill(pen, canvas.dataset.kind);
    pen.fillRect(0, 0, 28, 14);
  }

  return { draw, clear, legend, niceStep };
})();
