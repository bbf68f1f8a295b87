// The workers of each pool: a table on wide screens, cards on narrow ones.

import { at, keyed, make, quantity, say } from "./dom.js";
import { bytesPerSecond, count, percent, perSecond, seconds } from "./format.js";

const KV = "KV in use";
const CARRIERS = "by";

const carriers = (worker) => [...new Set(worker.links.map((link) => link.carrier))].join(", ");

// Why each link has the carrier that it has.
const reasons = (worker) =>
  worker.links
    .map(({ peer, carrier, reason, bytes_per_s }) => {
      const rate = bytes_per_s === null ? "" : `, ${(bytes_per_s / 1e9).toFixed(2)} GB/s`;
      return `${peer.slice(0, 6)}: ${carrier}${rate}${reason === "best" ? "" : ` (${reason})`}`;
    })
    .join("\n");

// [name, of a worker: [number, unit], what it means]
const column = (own, tokens) => [
  ["running", (w) => count(w.running)],
  ["waiting", (w) => count(w.waiting)],
  own,
  [KV, (w) => percent(w.kv_usage)],
  ["tokens", (w) => perSecond(w.tokens_per_s), tokens],
  ["hits", (w) => percent(w.hit_ratio), "Of prompt tokens, found in the prefix cache"],
  ["received", (w) => bytesPerSecond(w.received_bytes_per_s), "KV from other workers"],
  [CARRIERS, (w) => [carriers(w), ""], "Carriers of the KV from other workers"],
  ["step", (w) => seconds(w.step_s), "Mean of one pass of the engine"],
];

const QUEUED = ["queued", (w) => count(w.queued_prefill_tokens), "Prompt tokens to be computed"];
const ACCEPTED = ["accepted", (w) => percent(w.speculation?.acceptance), "Of drafted tokens"];
const COLUMNS = {
  prefill: column(QUEUED, "Prompt tokens computed"),
  decode: column(ACCEPTED, "Tokens generated"),
};

export const pools = (seen) => {
  const roles = Object.keys(COLUMNS).filter((role) => seen.workers.some((w) => w.role === role));
  keyed(at("tables"), roles, (role) => role, build, (node, role) => fill(node, role, seen));
};

const fill = (node, role, seen) => {
  const workers = seen.workers.filter((w) => w.role === role);
  const [head, walls, said, table, why] = node.children;
  const ready = workers.filter((w) => w.state === "ready").length;
  say(head.lastChild, `${ready} of ${workers.length} ready`);
  const wall = seen.walls.find((each) => each.role === role);
  ceilings(walls, wall);
  say(said, wall ? binding(wall) : "");
  keyed(table.tBodies[0], workers, (w) => w.instance, line, show);
  const silent = workers.filter((w) => w.why);
  const create = () => make("li");
  keyed(why, silent, (w) => w.instance, create, (item, w) => say(item, `${short(w)}: ${w.why}`));
};

const short = (worker) => worker.instance.slice(0, 6);

// How much of each ceiling is used; the wall that binds stands out.
const ceilings = (list, wall) => {
  const used = Object.entries(wall?.utilization ?? {});
  list.hidden = !used.length;
  const create = ([name]) => make("li", {}, `${name} `, make("span"));
  keyed(list, used, ([name]) => name, create, (item, [name, part]) => {
    level(item.lastChild, part, percent(part));
    item.className = name === wall.wall ? "binds" : "";
  });
};

const binding = ({ wall, text, techniques: [best] }) => {
  if (wall === null) return `${text[0].toUpperCase()}${text.slice(1)}.`;
  const gain = best && `${best.name} would give ${best.gain.toFixed(1)}×; the trap: ${best.trap}.`;
  return `Bound by ${wall}.${gain ? ` ${gain}` : ""}`;
};

// Roles are told again, as tables laid out as cards are no tables to some browsers.
const build = (role) => {
  const title = make("h3", { id: `pool-${role}` }, role === "prefill" ? "Prefill" : "Decode");
  const names = [["worker"], ["state"], ...COLUMNS[role]].map(([name, , about]) =>
    make("th", { scope: "col", role: "columnheader", ...(about && { title: about }) }, name),
  );
  const top = make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...names));
  const body = make("tbody", { role: "rowgroup" });
  return make(
    "div",
    { class: "card pool" },
    make("header", {}, title, make("p", { class: "soft" })),
    make("ul", { class: "walls", "aria-label": "Use of each ceiling" }),
    make("p", { class: "soft" }),
    make("table", { role: "table", "aria-labelledby": title.id }, top, body),
    make("ul", { class: "why" }),
  );
};

const line = (worker) => {
  const cell = ([name]) => make("td", { role: "cell", "data-label": name });
  const name = make("th", { scope: "row", role: "rowheader" }, make("code", {}, short(worker)));
  return make("tr", { role: "row" }, name, ...[["state"], ...COLUMNS[worker.role]].map(cell));
};

const show = (row, worker) => {
  const state = row.cells[1];
  const again = worker.engine_restarts;
  const lent = worker.home && worker.home !== worker.role;
  say(state, worker.state + (lent ? ", lent" : "") + (again ? ` (+${again})` : ""));
  state.className = `state-${worker.state}`;
  const from = lent ? [`Lent by the ${worker.home} pool`] : [];
  state.title = [...from, ...(again ? [`Its engine was replaced ${again} times`] : [])].join(". ");
  COLUMNS[worker.role].forEach(([name, of], i) => {
    const cell = row.cells[i + 2];
    if (worker.state === "silent") say(cell, "");
    else if (name === KV) level(cell, worker.kv_usage, of(worker));
    else quantity(cell, of(worker));
    if (name === CARRIERS) cell.title = reasons(worker);
  });
};

const level = (cell, part, shown) => {
  if (!cell.querySelector(".bar")) {
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("i"));
    cell.replaceChildren(bar, make("span"));
  }
  cell.querySelector("i").style.width = `${100 * Math.min(1, part ?? 0)}%`;
  quantity(cell.lastChild, shown);
};
