// The pools: how many workers are ready, which wall binds, and the table of the workers.

import { at, keyed, make, say } from "./dom.js";
import { percent } from "./format.js";
import { ROLES, WorkerTable, level, short } from "./workers.js";

const TITLES = { prefill: "Prefill", decode: "Decode" };

const tables = new Map(); // role -> WorkerTable

export const pools = (seen) => {
  const roles = ROLES.filter((role) => seen.workers.some((w) => w.role === role));
  keyed(at("tables"), roles, (role) => role, build, (node, role) => fill(node, role, seen));
};

const fill = (node, role, seen) => {
  const workers = seen.workers.filter((w) => w.role === role);
  const [head, walls, said] = node.children;
  const ready = workers.filter((w) => w.state === "ready").length;
  say(head.lastChild, `${ready} of ${workers.length} ready`);
  const wall = seen.walls.find((each) => each.role === role);
  ceilings(walls, wall);
  say(said, wall ? binding(wall) : "");
  tables.get(role).show(workers);
  const silent = workers.filter((w) => w.why);
  const create = () => make("li");
  const tell = (item, w) => say(item, `${short(w.instance)} on ${w.host}: ${w.why}`);
  keyed(node.lastChild, silent, (w) => w.instance, create, tell);
};

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

const build = (role) => {
  const title = make("h3", { id: `pool-${role}` }, TITLES[role]);
  tables.set(role, new WorkerTable(role, title));
  return make(
    "div",
    { class: "card pool" },
    make("header", {}, title, make("p", { class: "soft" })),
    make("ul", { class: "walls", "aria-label": "Use of each ceiling" }),
    make("p", { class: "soft" }),
    ...tables.get(role).nodes,
    make("ul", { class: "why" }),
  );
};
