// The step simulated in the page: a twin of simulator/engine.py, simulator/what_if.py and simulator/timeline.py.
// What it computes is tested against `shardwright simulate --json` at many settings of the sliders.

const LEAST_SPEED = 0.1; // of simulator/engine.py

// Columns over tables -> typed arrays that the simulation can run over many times.
function decodeStep(packed) {
  const count = packed.stream.length;
  const words = reader(packed.words), floats = reader(packed.numbers);
  const offsets = new Int32Array(count + 1);
  packed.waits.forEach((list, i) => { offsets[i + 1] = offsets[i] + list.length; });
  const earlier = new Int32Array(offsets[count]);
  packed.waits.forEach((list, i) => list.forEach((distance, k) => { earlier[offsets[i] + k] = i - distance; }));
  // In the order in which packing.py wrote them.
  const columns = {};
  for (const name of ["kind", "phase", "name", "module", "collective", "carries"]) columns[name] = words(packed[name]);
  for (const name of ["bytes", "latency", "wire", "local", "host"]) columns[name] = Float64Array.from(floats(packed[name]));
  const held = packed.storages, bytes = Float64Array.from(floats(held.bytes));
  const kinds = words(held.kind), whats = words(held.what), modules = words(held.module);
  let at = 0;
  const born = Int32Array.from(held.born, (step) => { at += step; return at; });
  const word = (column) => (index) => column[index];
  return {
    title: packed.title, ranks: packed.ranks, streams: packed.streams, count,
    processor: packed.processor, stream: Int32Array.from(packed.stream),
    latency: columns.latency, wire: columns.wire, local: columns.local, host: columns.host, bytes: columns.bytes, offsets, earlier,
    kind: word(columns.kind), phase: word(columns.phase), name: word(columns.name), module: word(columns.module),
    collective: word(columns.collective), carries: word(columns.carries),
    communication: packed.communication, peak: packed.peak,
    storages: {
      count: born.length, bytes, born, dies: Int32Array.from(held.lives, (life, i) => born[i] + life),
      kind: word(kinds), what: word(whats), module: word(modules),
    },
  };
}

// Columns say how far back in a table the entry stands; 0 is the next entry that was not read yet.
function reader(table) {
  let known = 0;
  return (column) => column.map((back) => (back === 0 ? table[known++] : table[known - back]));
}

// What else a processor has to do while it communicates for itself (engine.py, _Load).
class Load {
  constructor() { this.spans = []; } // [end, start, share], ordered
  add(start, end, share) {
    if (!(end > start)) return;
    const span = [end, start, share];
    let low = 0, high = this.spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (before(span, this.spans[middle])) high = middle; else low = middle + 1;
    }
    this.spans.splice(low, 0, span);
  }
  finish(start, work) {
    let now = start, first = 0;
    while (first < this.spans.length && this.spans[first][0] <= start) first += 1;
    for (let place = first; place < this.spans.length; place += 1) {
      const end = this.spans[place][0];
      if (end <= now) continue;
      const later = this.spans.slice(place);
      const borders = [...new Set([end, ...later.map((s) => s[1]).filter((begin) => now < begin && begin < end)])];
      borders.sort((a, b) => a - b);
      for (const border of borders) {
        let taken = 0;
        for (const [, begin, share] of later) if (begin <= now) taken += share;
        const speed = Math.max(1 - taken, LEAST_SPEED);
        if (work <= speed * (border - now)) return now + work / speed;
        work -= speed * (border - now);
        now = border;
      }
    }
    return now + work;
  }
}

function before(a, b) {
  for (let i = 0; i < 3; i += 1) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
}

const STREAM = -1, HOST = -2, NOTHING = -3; // why an event starts when it does, where no other event is the reason

// Run the step; whatIf = {links: {axis: factor}, device: factor, host: factor}.
function simulateStep(step, whatIf = {}) {
  const { count, stream, offsets, earlier } = step;
  const device = whatIf.device ?? 1, hostSpeed = whatIf.host ?? 1;
  const rates = step.streams.map((name) => whatIf.links?.[name] ?? 1);
  const starts = new Float64Array(count), ends = new Float64Array(count), issued = new Float64Array(count);
  const seconds = new Float64Array(count), cause = new Int32Array(count);
  const free = new Float64Array(step.streams.length), last = new Int32Array(step.streams.length).fill(NOTHING);
  const processor = step.processor, load = new Load();
  let clock = 0;
  for (let i = 0; i < count; i += 1) {
    const s = stream[i];
    const work = step.latency[i] + step.wire[i] / rates[s] + step.local[i] / device;
    clock += step.host[i] / hostSpeed;
    let start = Math.max(free[s], clock);
    cause[i] = start === 0 ? NOTHING : free[s] >= clock ? STREAM : HOST;
    for (let k = offsets[i]; k < offsets[i + 1]; k += 1) {
      if (ends[earlier[k]] > start) { start = ends[earlier[k]]; cause[i] = earlier[k]; }
    }
    let end = start + work;
    if (processor && work) {
      if (s === processor.stream) end = load.finish(start, work);
      else if (s in processor.shares) {
        const taken = Math.min(start + (processor.seconds[s] ?? 0), end);
        load.add(start, taken, 1);
        load.add(taken, end, processor.shares[s]);
      }
    }
    free[s] = end; last[s] = i;
    starts[i] = start; ends[i] = end; issued[i] = clock; seconds[i] = work;
  }
  const run = { step, starts, ends, issued, seconds, cause };
  run.total = count ? ends.reduce((most, end) => Math.max(most, end), clock) : 0;
  run.sum = 0;
  run.busy = step.streams.map(() => 0);
  for (let i = 0; i < count; i += 1) { run.sum += seconds[i]; run.busy[stream[i]] += seconds[i]; }
  run.exposed = exposedSeconds(run);
  run.bound = lowerBound(run, hostSpeed);
  return run;
}

function lowerBound(run, hostSpeed) {
  const { count, offsets, earlier, host } = run.step, ends = new Float64Array(count);
  let longest = 0, issuing = 0;
  for (let i = 0; i < count; i += 1) {
    let start = 0;
    for (let k = offsets[i]; k < offsets[i + 1]; k += 1) start = Math.max(start, ends[earlier[k]]);
    ends[i] = run.seconds[i] + start;
    longest = Math.max(longest, ends[i]);
    issuing += host[i] / hostSpeed;
  }
  return Math.max(longest, issuing, ...run.busy);
}

// Seconds in which something communicates and nothing computes; stream 0 is the one that computes.
function exposedSeconds(run) {
  const spans = [[], []];
  for (let i = 0; i < run.step.count; i += 1) if (run.seconds[i] > 0) spans[run.step.stream[i] === 0 ? 1 : 0].push([run.starts[i], run.ends[i]]);
  return uncovered(...spans);
}

// The length of some spans without what others cover.
function uncovered(some, others) {
  const talk = merged(some), compute = merged(others);
  let common = 0;
  for (let i = 0, j = 0; i < talk.length && j < compute.length;) {
    common += Math.max(0, Math.min(talk[i][1], compute[j][1]) - Math.max(talk[i][0], compute[j][0]));
    if (talk[i][1] < compute[j][1]) i += 1; else j += 1;
  }
  return talk.reduce((sum, [start, end]) => sum + (end - start), 0) - common;
}

function merged(spans) {
  const found = [];
  spans.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [start, end] of spans) {
    const top = found[found.length - 1];
    if (top && start <= top[1]) top[1] = Math.max(top[1], end); else found.push([start, end]);
  }
  return found;
}

// Bytes alive over the seconds of the step, per kind: {times, kinds, levels: [per kind Float64Array], total}.
function memoryOverTime(run) {
  const { storages } = run.step, kinds = [], places = {}, changes = [];
  for (let i = 0; i < storages.count; i += 1) {
    const kind = storages.kind(i);
    if (!(kind in places)) { places[kind] = kinds.length; kinds.push(kind); }
    const born = storages.born[i];
    changes.push([born < 0 ? 0 : run.starts[born], places[kind], storages.bytes[i]]);
    if (born >= 0) changes.push([run.ends[storages.dies[i]], places[kind], -storages.bytes[i]]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  const times = [], levels = kinds.map(() => []), total = [], now = kinds.map(() => 0);
  for (let i = 0; i < changes.length; i += 1) {
    now[changes[i][1]] += changes[i][2];
    if (i + 1 < changes.length && changes[i + 1][0] === changes[i][0]) continue;
    times.push(changes[i][0]);
    kinds.forEach((_, k) => levels[k].push(now[k]));
    total.push(now.reduce((a, b) => a + b, 0));
  }
  return { times, kinds, levels, total };
}

// The largest storages alive at a second.
function aliveAt(run, second, most = 6) {
  const { storages } = run.step, alive = [];
  for (let i = 0; i < storages.count; i += 1) {
    const born = storages.born[i];
    const start = born < 0 ? 0 : run.starts[born], end = born < 0 ? Infinity : run.ends[storages.dies[i]];
    if (start <= second && second < end) alive.push(i);
  }
  alive.sort((a, b) => storages.bytes[b] - storages.bytes[a]);
  return alive.slice(0, most).map((i) => ({
    bytes: storages.bytes[i], kind: storages.kind(i), what: storages.what(i), module: storages.module(i),
  }));
}

// Why an event starts when it does, in words.
function whyThen(run, i) {
  const { step } = run, cause = run.cause[i];
  if (cause === NOTHING) return "starts with the step";
  if (cause === HOST) return "starts as soon as the host has issued it";
  if (cause === STREAM) return `starts when ${step.stream[i] === 0 ? "the device" : "the link"} is done with what came before`;
  return `waits for ${eventTitle(step, cause)}`;
}

function eventTitle(step, i) {
  const talk = step.collective(i);
  return talk ? `${talk.replaceAll("_", "-")} of ${step.name(i)}` : `${step.phase(i)} of ${step.name(i)}`;
}

// Events on the chain that decides the step's length, last first; where it begins with the host's issuing, `issuedTo` says
// up to which event.
function decidingChain(run) {
  const { step } = run, chain = [], previous = new Int32Array(step.count), last = new Int32Array(step.streams.length).fill(-1);
  for (let i = 0; i < step.count; i += 1) { previous[i] = last[step.stream[i]]; last[step.stream[i]] = i; }
  let at = -1;
  for (let i = 0; i < step.count; i += 1) if (at < 0 || run.ends[i] > run.ends[at]) at = i;
  while (at >= 0) {
    chain.push(at);
    const cause = run.cause[at];
    if (cause === HOST) return { chain, issuedTo: at };
    at = cause >= 0 ? cause : cause === STREAM ? previous[at] : -1;
  }
  return { chain, issuedTo: -1 };
}
