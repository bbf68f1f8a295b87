// The workers of each pool: a table on wide screens, cards on narrow ones.

import { at, keyed, make, quantity, say } from "./dom.js";
import { bytesPerSecond, count, percent, perSecond, seconds } from "./format.js";

const COMMON = [
  ["running", (w) => count(w.running)],
  ["waiting", (w) => count(w.waiting)],
];
const COLUMNS = {
  prefill: [
    ...COMMON,
    ["queued", (w) => count(w.queued_prefill_tokens), "Prompt tokens still to be computed"],
    ["KV in use", (w) => percent(w.kv_usage)],
    ["tokens", (w) => perSecond(w.tokens_per_s), "Prompt tokens computed"],
    ["hits", (w) => percent(w.hit_ratio), "Of prompt tokens, found in the prefix cache"],
    ["received", (w) => bytesPerSecond(w.received_bytes_per_s), "KV from other workers"],
    ["step", (w) => seconds(w.step_s), "Mean of one pass of the engine"],
  ],
  decode: [
    ...COMMON,
    ["accepted", (w) => percent(w.speculation?.acceptance), "Of drafted tokens"],
    ["KV in use", (w) => percent(w.kv_usage)],
    ["tokens", (w) => perSecond(w.tokens_per_s), "Tokens generated"],
    ["hits", (w) => percent(w.hit_ratio), "Of prompt tokens, found in the prefix cache"],
    ["received", (w) => bytesPerSecond(w.received_bytes_per_s), "KV from other workers"],
    ["step", (w) => seconds(w.step_s), "Mean of one pass of the engine"],
  ],
};

export const pools = (seen) => {
  const roles = Object.keys(COLUMNS).filter((role) => seen.workers.some((w) => w.role === role));
  keyed(
    at("tables"),
    roles,
    (role) => role,
    build,
    (node, role) => {
      const workers = seen.workers.filter((w) => w.role === role);
      const [head, wall, table, why] = node.children;
      say(head.lastChild, sums(role, workers));
      say(wall, binding(seen, role));
      wall.hidden = !wall.textContent;
      keyed(
        table.tBodies[0],
        workers,
        (w) => w.instance,
        (w) => line(w, role),
        fill,
      );
      const troubled = workers.filter((w) => w.why);
      keyed(
        why,
        troubled,
        (w) => w.instance,
        () => make("li"),
        (item, w) => say(item, `${short(w)}: ${w.why}`),
      );
    },
  );
};

const short = (worker) => worker.instance.slice(0, 6);

const sums = (role, workers) => {
  const ready = workers.filter((w) => w.state === "ready").length;
  return `${ready} of ${workers.length} ready`;
};

const binding = (seen, role) => seen.walls?.find((wall) => wall.role === role)?.text ?? "";

const build = (role) => {
  const title = make("h3", { id: `pool-${role}` }, role === "prefill" ? "Prefill" : "Decode");
  const names = [["worker"], ["state"], ...COLUMNS[role]].map(([name, , about]) =>
    make("th", { scope: "col", role: "columnheader", ...(about ? { title: about } : {}) }, name),
  );
  const top = make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...names));
  const table = make(
    "table",
    { role: "table", "aria-labelledby": title.id },
    top,
    make("tbody", { role: "rowgroup" }),
  );
  return make(
    "div",
    { class: "card pool" },
    make("header", {}, title, make("p", { class: "soft" })),
    make("p", { class: "wall" }),
    table,
    make("ul", { class: "why" }),
  );
};

const line = (worker, role) => {
  const cells = COLUMNS[role].map(([name]) => make("td", { role: "cell", "data-label": name }));
  const name = make("th", { scope: "row", role: "rowheader" }, make("code", {}, short(worker)));
  return make(
    "tr",
    { role: "row" },
    name,
    make("td", { role: "cell", "data-label": "state" }),
    ...cells,
  );
};

const fill = (row, worker) => {
  const state = row.cells[1];
  const again = worker.engine_restarts ? ` (+${worker.engine_restarts})` : "";
  say(state, worker.state + again);
  state.className = `state-${worker.state}`;
  state.title = again ? `Its engine was replaced ${worker.engine_restarts} times` : "";
  COLUMNS[worker.role].forEach(([name, of], i) => {
    const cell = row.cells[i + 2];
    if (worker.state === "silent") return say(cell, "");
    name === "KV in use" ? level(cell, worker.kv_usage, of(worker)) : quantity(cell, of(worker));
  });
};

const level = (cell, part, shown) => {
  if (!cell.querySelector(".bar")) {
    cell.replaceChildren(
      make("span", { class: "bar", "aria-hidden": "true" }, make("i")),
      make("span"),
    );
  }
  cell.querySelector("i").style.width = `${100 * Math.min(1, part ?? 0)}%`;
  quantity(cell.lastChild, shown);
};
