// For an operator: its options, what it would cost itself and what the whole would cost at best with each.

class Why {
  constructor(box, data) {
    this.box = box; this.data = data; this.select = box.querySelector("select"); this.answer = box.querySelector(".answer");
    const rows = data.split.filter((row) => row.row === "operator" && data.why[row.name]);
    const rank = Object.keys(data.why);
    rows.sort((a, b) => rank.indexOf(a.name) - rank.indexOf(b.name));
    this.rows = new Map(rows.map((row) => [row.name, row]));
    this.select.replaceChildren(...rows.map((row) => element("option", { value: row.name }, `${data.step.stages.length > 1 ? `stage ${row.stage} · ` : ""}${row.module ? `${row.module} · ` : ""}${row.name}${row.times > 1 ? ` (× ${row.times})` : ""}`)));
    this.select.addEventListener("change", () => this.show(this.select.value));
    if (rows.length) this.show(rows[0].name);
    else this.answer.replaceChildren(element("p", {}, "No alternatives were asked for. "), element("code", {}, `shardwright explain ${data.file} OPERATOR`));
  }

  go(name) {
    if (this.rows.has(name)) { this.select.value = name; this.show(name); }
    else this.answer.replaceChildren(element("p", {}, `This page did not ask about ${name}. `), element("code", {}, `shardwright explain ${this.data.file} ${name}`));
    document.getElementById("why").scrollIntoView();
    this.select.focus({ preventScroll: true });
  }

  show(name) {
    const row = this.rows.get(name), options = this.data.why[name], axes = axesOf(this.data, row);
    const chosen = options.find((o) => o.chosen), finite = options.map((o) => o.total).filter((t) => t !== null);
    const best = Math.min(...finite), most = Math.max(...finite);
    const lines = options.map((option) => {
      const loops = option.loops.map((loop, a) => `${axes[a].name}: ${loop ?? "whole"}`).join(", ");
      const bar = element("span", { class: "bar" });
      bar.style.width = option.total === null ? "0" : `${4 + 51 * (most > best ? (option.total - best) / (most - best) : 0)}%`;
      const more = option.total === null ? "does not fit" : option.total === best ? "best" : `+${secondsText(option.total - best)}`;
      return element("tr", option.chosen ? { class: "chosen" } : {}, element("th", { scope: "row" }, loops + (option.chosen ? " (chosen)" : "")),
        element("td", {}, option.own === null ? "–" : secondsText(option.own)), element("td", {}, option.total === null ? "does not fit" : secondsText(option.total)),
        element("td", { class: "bars" }, bar, element("span", {}, more)));
    });
    const notes = `${row.target} of ${row.module || "the model"}${row.times > 1 ? `, one of ${row.times} that decide together` : ""}. Best total: the smallest sum of seconds with this option, all else decided anew.`
      + (chosen && chosen.total !== best ? " The chosen one is faster when simulated, with overlap." : "");
    this.answer.replaceChildren(element("p", { class: "hint" }, notes), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Options of ${name}` }, element("table", {},
      element("thead", {}, element("tr", {}, ...["loop cut per axis", "operator itself", "best total", "above the best"].map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, ...lines))));
  }
}
