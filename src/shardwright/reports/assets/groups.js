// What the timeline shows of a simulated step: the passes and bubbles of all groups of ranks, the streams of one of them, what was measured.

const PASSES = { F: "forward", I: "gradient of inputs", W: "gradient of weights", B: "backward", close: "sums between replicas and optimizer update" };
const PASS_ACTS = { F: "forward", I: "backward", B: "backward", W: "weights", close: "update", bubble: "bubble" };

function passName({ stage, kind, mb }) { return `${PASSES[kind]} of ${kind === "close" ? "" : `micro-batch ${mb}, `}stage ${stage}`; }

// Groups of ranks from top to bottom, their passes from left to right; what is left open is a bubble.
function passesGroup(run, stages, title) {
  const bars = [], rows = run.groups.map((order, g) => {
    const ids = [];
    let free = 0;
    const put = (bar) => { ids.push(bars.length); bars.push(bar); };
    const idle = (until, next) => { if (until - free > 1e-12 * run.total) put({ kind: "bubble", start: free, end: until, next, group: g }); };
    for (const action of order) { idle(action.start, action); put(action); free = action.end; }
    const { start, end } = run.closing[g];
    if (end > start) { idle(start, { kind: "close", stage: run.stagesOf[g][0], mb: -1 }); put({ kind: "close", stage: run.stagesOf[g][0], mb: -1, start: Math.max(start, free), end }); free = end; }
    idle(run.total, null);
    const { ranks } = stages[run.stagesOf[g][0]];
    return { label: `stage ${run.stagesOf[g].join(", ")} · ${rankWord(ranks)}`, short: `stage ${run.stagesOf[g].join(", ")}`, ids };
  });
  const chain = new Set(decidingPasses(run));
  const waits = (action) => {
    if (action.kind === "close") return "begins when the loss is known";
    if (action.against === AGAINST.START) return "starts with the step";
    if (action.against === AGAINST.GROUP) return "starts when its ranks are done with what came before";
    return `waits for ${passName(action.cause)}${action.hop ? `, which is on its way for ${secondsText(action.hop)}` : ""}`;
  };
  return {
    title, rows, run, room: 13,
    start: (i) => bars[i].start, end: (i) => bars[i].end, act: (i) => PASS_ACTS[bars[i].kind], onChain: (i) => chain.has(bars[i]),
    text: (i, room) => (bars[i].kind === "bubble" ? (room > 60 ? "bubble" : "") : passText(bars[i], room)),
    lines: (i) => {
      const bar = bars[i], long = `${secondsText(bar.end - bar.start)}, from ${secondsText(bar.start)} to ${secondsText(bar.end)}`;
      if (bar.kind === "bubble") return ["bubble: these ranks wait", long, bar.next ? `for ${passName(bar.next)}, which ${waits(bar.next)}` : "for the slowest to end the step"];
      const program = bar.kind === "close" ? null : run.program(bar.stage, bar.mb);
      return [passName(bar), long, ...(program ? [`${run.variant.rows[run.variant.sizes[bar.mb]]} rows, ${bytesText(program.held.held)} held until its backward pass`, waits(bar)] : []), ...(chain.has(bar) ? ["on the chain that decides the step"] : [])];
    },
  };
}

// The recorded passes of every rank, as the predicted ones are shown.
function measuredPasses(measured, stages) {
  const bars = [], rows = measured.ranks.map(({ rank, passes, times, closing }) => {
    const ids = [], put = (bar) => { ids.push(bars.length); bars.push(bar); };
    passes.split(" ").forEach((word, k) => { const [, stage, kind, mb] = word.match(PASS); put({ stage, kind, mb, start: times[k][0], end: times[k][1] }); });
    const mine = stages.map((stage, s) => (stage.ranks.includes(rank) ? s : -1)).filter((s) => s >= 0);
    for (const [start, end] of closing) put({ stage: mine[0], kind: "close", mb: -1, start, end });
    return { label: `rank ${rank} · stage ${mine.join(", ")}`, short: `rank ${rank}`, ids };
  });
  return {
    title: measured.title, rows, room: 13,
    start: (i) => bars[i].start, end: (i) => bars[i].end, act: (i) => PASS_ACTS[bars[i].kind], onChain: () => true,
    text: (i, room) => passText(bars[i], room),
    lines: (i) => [passName(bars[i]), `measured ${secondsText(bars[i].end - bars[i].start)}, from ${secondsText(bars[i].start)}`],
  };
}

function passText({ kind, mb }, room) {
  if (kind === "close") return room > 44 ? "update" : "";
  return room > 90 ? `${mb} · ${PASSES[kind]}` : `${mb}`;
}

function rankWord(ranks) { return ranks.length > 1 ? `ranks ${ranks[0]}–${ranks[ranks.length - 1]}` : `rank ${ranks[0]}`; }

function decidingPasses(run) {
  let slowest = 0;
  run.closing.forEach((one, g) => { if (one.end > run.closing[slowest].end) slowest = g; });
  const chain = [];
  for (let at = run.groups[slowest][run.groups[slowest].length - 1]; at; at = at.cause) chain.push(at);
  return chain;
}

// The streams of one rank of a group, event by event, and the host where it has work of its own.
function streamsGroup(events, title) {
  const { run, programs, numbers, count } = events, rows = new Map(), hosted = [];
  const alone = run.groups.length === 1, decides = alone ? decidingChain(events) : null, chain = new Set(decides?.chain); // across groups passes decide
  for (const name of run.loads[events.group].keys()) rows.set(name, { label: name === COMPUTES ? COMPUTES : `link ${name}`, ids: [] });
  for (let k = 0; k < count; k += 1) {
    const { step } = programs[k];
    if (events.seconds[k] > 0) rows.get(step.streams[step.stream[numbers[k]]]).ids.push(k);
    if (step.host[numbers[k]] > 0) hosted.push(count + k);
  }
  const of = (k) => [programs[k].step, numbers[k]], host = (k) => programs[k].step.host[numbers[k]] / run.speeds.host;
  const then = (k) => {
    const cause = events.cause[k], [step, i] = of(k);
    if (cause === NOTHING) return "starts with the step";
    if (cause === HOST) return "starts as soon as the host has issued it";
    if (cause === STREAM) return `starts when ${step.stream[i] === 0 ? "the device" : "the link"} is done with what came before`;
    return `waits for ${eventTitle(step, cause)}`;
  };
  return {
    title, rows: [...[...rows.values()].filter((row) => row.ids.length), ...(hosted.length ? [{ label: "host", ids: hosted }] : [])], run,
    start: (k) => (k >= count ? events.issued[k - count] - host(k - count) : events.starts[k]),
    end: (k) => (k >= count ? events.issued[k - count] : events.ends[k]),
    act: (k) => { if (k >= count) return "host"; const [step, i] = of(k); return step.carries(i) || (events.actions[k].kind === "W" ? "weights" : step.phase(i)); },
    text: (k) => { const [step, i] = of(k >= count ? k - count : k); return (k < count && step.collective(i).replaceAll("_", "-")) || step.name(i); },
    onChain: (k) => !alone || (k >= count ? k - count <= decides.issuedTo : chain.has(k)),
    lines: (k) => {
      if (k >= count) return [`host issues ${eventTitle(...of(k - count))}`, secondsText(host(k - count))];
      const [step, i] = of(k), lines = [eventTitle(step, i), `${secondsText(events.ends[k] - events.starts[k])}, from ${secondsText(events.starts[k])} to ${secondsText(events.ends[k])}`];
      if (severalPasses(run)) lines.push(`in ${passName(events.actions[k])}`);
      if (step.module(i)) lines.push(`module ${step.module(i)}`);
      if (step.bytes[i]) lines.push(`${bytesText(step.bytes[i])} over ${step.streams[step.stream[i]]}, ${ACTS[step.carries(i)]}`);
      lines.push(then(k));
      if (chain.has(k)) lines.push("on the chain that decides the step");
      return lines;
    },
  };
}

// What one rank was measured to run, as the same kind of group.
function measuredGroup(measured) {
  const rows = measured.streams.map((label) => ({ label, ids: [] }));
  measured.stream.forEach((s, i) => rows[s].ids.push(i));
  const word = (column) => (i) => measured.words[measured[column][i]];
  return {
    title: measured.title, rows: rows.filter((row) => row.ids.length),
    start: (i) => measured.start[i], end: (i) => measured.end[i], act: word("phase"), text: word("name"), onChain: () => true,
    lines: (i) => [`${word("phase")(i)} of ${word("name")(i)}`, `measured ${secondsText(measured.end[i] - measured.start[i])}`],
  };
}

// Whether there is an order of passes to look at: several groups of ranks, or several micro-batches.
function severalPasses(run) { return run.groups.length > 1 || run.variant.microbatches > 1; }

// Everything that is shown of a run: passes where there are several, the streams of one group, and what was measured of both.
function shownGroups(run, stages, events, measured) {
  const stage = run.stagesOf[events.group], { ranks } = stages[stage[0]], spans = measured?.spans[events.group], said = measured ? "predicted, " : "";
  const where = run.groups.length > 1 ? `, stage ${stage.join(", ")}` : "", each = `streams of ${ranks.length > 1 ? "each of " : ""}${rankWord(ranks)}${where}`;
  const passes = severalPasses(run) ? [passesGroup(run, stages, `${said}${run.groups.length > 1 ? "all stages" : "all passes"}`), ...(measured ? [measuredPasses(measured, stages)] : [])] : [];
  const title = passes.length || spans ? `${said}${each}` : "";
  return [...passes, streamsGroup(events, title), ...(spans ? [measuredGroup(spans)] : [])];
}
