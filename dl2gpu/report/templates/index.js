(() => {
  const byId = (id) => document.getElementById(id);
  const { columns: C, verdicts, teams } = JSON.parse(byId("d-jobs").textContent);
  const n = C.job.length;
  const lower = C.job.map((job, i) => [
    job, C.id[i], C.blamed[i], verdicts[C.verdict[i]].words,
    C.team[i] === null ? "" : teams[C.team[i]],
  ].join("\n").toLowerCase());
  const state = { key: "verdict", down: false, from: 0, rows: [] };
  const size = () => Number(byId("size").value);
  const order = (key) => {
    const column = C[key];
    const text = key === "job" || key === "blamed";
    const compare = text ? new Intl.Collator("en", { numeric: true }).compare : (a, b) => a - b;
    const sign = state.down ? -1 : 1;
    return (a, b) => {
      const x = column[a], y = column[b];
      const none = (v) => v === null || v === "";
      if (none(x) || none(y)) return none(x) - none(y) || a - b; // those that say nothing come last
      return sign * compare(x, y) || a - b;
    };
  };
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const number = (x) => x === null ? "" : x.toLocaleString("en");
  const hours = (x) => x === null ? ""
    : x.toLocaleString("en", { maximumSignificantDigits: 3 });
  const when = (ms) => {
    const at = new Date(ms);
    return ms === null || Number.isNaN(at.getTime()) ? ""
      : at.toISOString().slice(0, 16).replace("T", " ");
  };
  const row = (i) => {
    const tr = element("tr");
    const job = element("td", undefined, "w");
    const name = C.job[i] + (C.attempt[i] ? ` (attempt ${C.attempt[i]})` : "");
    if (C.page[i]) {
      const link = element("a", name);
      link.href = C.page[i];
      job.append(link);
    } else {
      job.append(name);
      if (C.id[i]) job.append(" ", element("small", C.id[i]));
    }
    if (C.more[i]) job.append(" ", element("small", `and ${C.more[i]} more`));
    const verdict = verdicts[C.verdict[i]];
    const said = element("td");
    said.append(element("span", verdict.words, `badge ${verdict.tone}`));
    const ranks = C.world[i] === null ? number(C.present[i])
      : C.present[i] < C.world[i] ? `${number(C.present[i])} of ${number(C.world[i])}`
        : number(C.world[i]);
    const cells = [["ranks", ranks, "n"], ["", C.blamed[i]], ["GPU-hours lost", hours(C.hours[i]), "n"],
      ["stopped", when(C.stopped[i]), "s"]];
    if (teams.length) cells.push(["", C.team[i] === null ? "" : teams[C.team[i]]]);
    cells.push(["operations", number(C.events[i]), "n"]);
    tr.append(job, said);
    for (const [label, text, kind] of cells) {
      const td = element("td", text, kind);
      if (label && text) td.dataset.l = label;
      tr.append(td);
    }
    return tr;
  };
  const table = byId("jobs");
  const show = (count = size()) => {
    const { rows, from } = state;
    table.tBodies[0].replaceChildren(...rows.slice(from, from + count).map(row));
    const of = rows.length === n ? `${number(n)} jobs` : `${number(rows.length)} of ${number(n)} jobs`;
    byId("shown").textContent = of;
    byId("at").textContent = rows.length
      ? `${number(from + 1)} to ${number(Math.min(from + count, rows.length))}` : "none";
    byId("back").disabled = from === 0;
    byId("on").disabled = from + count >= rows.length;
    byId("pager").hidden = rows.length <= count;
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.k === state.key) {
        head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      } else head.removeAttribute("aria-sort");
    }
  };
  const update = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = byId("verdict").value;
    const team = byId("team") ? byId("team").value : "";
    const rows = [];
    for (let i = 0; i < n; i++) {
      if (verdict !== "" && C.verdict[i] !== Number(verdict)) continue;
      if (team !== "" && C.team[i] !== Number(team)) continue;
      if (words.every((word) => lower[i].includes(word))) rows.push(i);
    }
    state.rows = rows.sort(order(state.key));
    state.from = 0;
    for (const bar of document.querySelectorAll("[data-verdict]")) {
      bar.setAttribute("aria-pressed", String(bar.dataset.verdict === verdict));
    }
    show();
  };
  for (const head of table.tHead.rows[0].cells) {
    const button = element("button", head.textContent);
    button.type = "button";
    button.addEventListener("click", () => {
      const { k } = head.dataset;
      const numbers = ["world", "hours", "stopped", "events"].includes(k); // most first
      state.down = state.key === k ? !state.down : numbers;
      state.key = k;
      update();
    });
    head.replaceChildren(button);
  }
  for (const id of ["filter", "verdict", "team", "size"]) {
    if (byId(id)) byId(id).addEventListener("input", update);
  }
  for (const bar of document.querySelectorAll("[data-verdict]")) {
    bar.addEventListener("click", () => {
      const choice = byId("verdict");
      choice.value = choice.value === bar.dataset.verdict ? "" : bar.dataset.verdict;
      update();
      byId("table").scrollIntoView();
    });
  }
  const turn = (by) => { state.from = Math.max(0, state.from + by * size()); show(); byId("table").scrollIntoView(); };
  byId("back").addEventListener("click", () => turn(-1));
  byId("on").addEventListener("click", () => turn(1));
  addEventListener("beforeprint", () => { state.from = 0; show(500); });
  addEventListener("afterprint", () => show());
  byId("tools").hidden = false;
  update();

  // What it costs: each measured stop holds its GPUs until the end, or until the alarm.
  const cost = JSON.parse(byId("d-cost").textContent);
  if (!cost.pairs.length) return;
  byId("calculator").hidden = false;
  const start = { fleet: cost.fleet, hangs: cost.hangs, minutes: cost.minutes, price: cost.price || 0 };
  const most = {
    fleet: Math.max(4 * cost.fleet, 64), hangs: Math.max(4 * cost.hangs, 10),
    minutes: Math.max(cost.longest, 1), price: Math.max(4 * (cost.price || 0), 10),
  };
  const value = { ...start };
  const give = (gpuHours) => {
    const text = `${gpuHours.toLocaleString("en", { maximumSignificantDigits: 3 })} GPU-hours`;
    if (!value.price) return text;
    const money = (gpuHours * value.price).toLocaleString("en", { maximumFractionDigits: gpuHours * value.price < 100 ? 2 : 0 });
    return `${text}, ${money} in your currency`;
  };
  const compute = () => {
    let now = 0, then = 0;
    for (const [gpus, time] of cost.pairs) {
      const held = value.fleet ? Math.min(gpus, value.fleet) : gpus;
      now += held * time;
      then += held * Math.min(time, value.minutes / 60);
    }
    const each = value.hangs / cost.pairs.length;
    byId("o-now").textContent = give(now * each);
    byId("o-then").textContent = give(then * each);
    byId("o-saved").textContent = give((now - then) * each * 52);
    const share = value.fleet ? 100 * now * each / (value.fleet * 168) : 0;
    byId("o-share").textContent = value.fleet
      ? `Unnoticed hangs take ${share.toLocaleString("en", { maximumSignificantDigits: 3 })} % of what the fleet can do in a week.`
      : "";
  };
  for (const name of Object.keys(start)) {
    const range = byId(`r-${name}`), box = byId(`n-${name}`);
    range.max = most[name];
    range.value = box.value = start[name];
    const take = (from) => {
      value[name] = Math.max(0, Number(from.value) || 0);
      const shown = Number(value[name].toPrecision(3));
      if (from === range) { value[name] = shown; box.value = shown; } else range.value = value[name];
      compute();
    };
    range.addEventListener("input", () => take(range));
    box.addEventListener("input", () => take(box));
  }
  compute();
})();
