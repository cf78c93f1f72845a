// Unpack what the page carries and bring its sections to life. What can be read without this is in the document already.

async function unpacked(id) {
  const text = document.getElementById(id).textContent, bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function themeButton() {
  const button = document.querySelector(".theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const say = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", dark() ? "Switch to light colours" : "Switch to dark colours"); };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { say(); redraw(); });
  say();
}

const drawings = [];
function redraw() { colours.clear(); for (const drawing of drawings) (drawing.ask ?? drawing.draw).call(drawing); }

function legend(box, acts) {
  box.replaceChildren(...acts.map((act) => element("li", {}, swatch(`var(--act-${act})`), ACTS[act])));
}

function actsOf(groups) {
  const found = new Set();
  for (const group of groups) for (const row of group.rows) for (const i of row.ids) found.add(group.act(i));
  return Object.keys(ACTS).filter((act) => found.has(act));
}

// The section's buttons, its legend, and `again` for when another run is to be shown.
function timelineOf(first, view, groups) {
  const box = document.getElementById("timeline"), timeline = new Timeline(box, view, first);
  legend(box.querySelector(".legend"), actsOf(timeline.groups));
  for (const [name, act] of [["zoom-in", () => view.zoom(2)], ["zoom-out", () => view.zoom(0.5)], ["zoom-all", () => view.reset()]]) box.querySelector(`.${name}`).addEventListener("click", act);
  box.querySelector(".chain").addEventListener("change", (event) => { timeline.chain = event.target.checked; timeline.ask(); });
  timeline.again = (given) => {
    timeline.groups = groups(given); timeline.selected = null;
    legend(box.querySelector(".legend"), actsOf(timeline.groups));
    view.reset(wholeOf(timeline.groups));
  };
  view.reset(wholeOf(timeline.groups));
  drawings.push(timeline);
  return timeline;
}

function wholeOf(groups) {
  let most = 0;
  for (const group of groups) for (const row of group.rows) if (row.ids.length) most = Math.max(most, group.end(row.ids[row.ids.length - 1]));
  return most;
}

function planPage(data) {
  const model = new StepModel(data.step), view = new View(1), banner = document.querySelector(".banner"), { stages } = data.step;
  const memory = new MemoryChart(document.getElementById("memory"), view, data.limit), choices = [...document.querySelectorAll("select.group")];
  let timeline = null, waiting = 0, shown = null, group = Number(choices[0]?.value ?? 0);
  const groups = (run) => { shown = groupEvents(run, group); return shownGroups(run, stages, shown, data.measured); };
  const whatIf = new WhatIf(document.getElementById("what-if"), data, model, (run, changed) => {
    timeline.again(run);
    banner.hidden = !changed;
    clearTimeout(waiting); // a slider that moves asks many times a second, and memory is the slower picture
    waiting = setTimeout(() => memory.show(groupMemory(shown)), 60);
  });
  timeline = timelineOf(groups(whatIf.plan), view, groups);
  memory.show(groupMemory(shown));
  drawings.push(memory);
  for (const choice of choices) {
    choice.addEventListener("change", () => {
      group = Number(choice.value);
      for (const other of choices) other.value = choice.value;
      const { from, to } = view;
      timeline.again(whatIf.simulate());
      view.set(from, to);
      memory.show(groupMemory(shown));
    });
  }
  banner.querySelector("button").addEventListener("click", () => whatIf.reset());
  return { data, model, view, timeline, memory, whatIf, ...otherSections(data) };
}

// What does not depend on when things run.
function otherSections(data) {
  const tree = new SplitTree(document.getElementById("split"), data), why = new Why(document.getElementById("why"), data), box = document.getElementById("communication");
  tree.onWhy = (name) => why.go(name);
  if (box.querySelector("canvas")) {
    const traffic = new TrafficMatrix(box, data);
    traffic.draw();
    drawings.push(traffic);
  }
  return { tree, why };
}

// Two plans: of each the passes where there are several, else the streams of its one kind of rank.
function diffPage(data) {
  const view = new View(1), runs = data.plans.map((plan) => new StepModel(plan.step).run());
  const group = (run, { name, step }) => (severalPasses(run) ? passesGroup(run, step.stages, name) : streamsGroup(groupEvents(run, 0), name));
  const timeline = timelineOf(runs.map((run, i) => group(run, data.plans[i])), view);
  return { data, runs, view, timeline };
}

async function start() {
  themeButton();
  const data = await unpacked("data");
  window.shardwright = data.plans ? diffPage(data) : planPage(data);
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
  document.documentElement.dataset.ready = "yes";
}

start();
