// The table of a pool's workers. It is sorted by the column that is clicked, and shows the first
// rows only where there are many.

import { keyed, make, quantity, say } from "./dom.js";
import { bytesPerSecond, count, percent, perSecond, seconds } from "./format.js";

const FOLDED = 8; // rows of a folded table
const MANY = 10; // more workers than this are folded
const STATES = ["silent", "down", "draining", "ready"];

export const short = (instance) => instance.slice(0, 6);

export const sum = (workers, of) => workers.reduce((total, w) => total + (of(w) ?? 0), 0);

const carriers = (worker) => [...new Set(worker.links.map((link) => link.carrier))].join(", ");

// Why each link has the carrier that it has.
const reasons = (worker) =>
  worker.links
    .map(({ peer, carrier, reason, bytes_per_s }) => {
      const rate = bytes_per_s === null ? "" : `, ${(bytes_per_s / 1e9).toFixed(2)} GB/s`;
      return `${short(peer)}: ${carrier}${rate}${reason === "best" ? "" : ` (${reason})`}`;
    })
    .join("\n");

// `of` gives the value by which rows are sorted, null where there is none, and `form` its
// [number, unit]. `all` is the value of the whole pool.
const number = (name, of, form, about, all = (workers) => sum(workers, of)) => ({
  name,
  of,
  form,
  about,
  all,
});
const none = () => undefined; // no figure for the whole pool
const words = (name, of, all = () => "") => ({ name, of, all, textual: true });

export const usage = (workers) => {
  const room = sum(workers, (w) => w.kv_tokens);
  return room ? sum(workers, (w) => w.kv_usage * w.kv_tokens) / room : null;
};

const hosts = (workers) => {
  const different = new Set(workers.map((w) => w.host)).size;
  return different === 1 ? "1 host" : `${different} hosts`;
};

const QUEUED = number(
  "queued",
  (w) => w.queued_prefill_tokens,
  count,
  "Prompt tokens that wait to be computed",
);
const ACCEPTED = number(
  "accepted",
  (w) => w.speculation?.acceptance ?? null,
  percent,
  "Accepted share of drafted tokens",
  none,
);
const HITS = "Share of prompt tokens found in the prefix cache";
const STATE = { ...words("state", (w) => w.state), rank: (w) => STATES.indexOf(w.state) };
const KV = { ...number("KV in use", (w) => w.kv_usage, percent, "", usage), bar: true };
const BY = { ...words("by", carriers), about: "Carriers of the KV from other workers" };

const columns = (own, tokens) => [
  words("worker", (w) => w.instance, (workers) => `all ${workers.length}`),
  words("host", (w) => w.host, hosts),
  STATE,
  number("running", (w) => w.running, count, "Requests in the engine's batch"),
  number("waiting", (w) => w.waiting, count, "Requests that wait in the worker"),
  own,
  KV,
  number("tokens", (w) => w.tokens_per_s, perSecond, tokens),
  number("hits", (w) => w.hit_ratio, percent, HITS, none),
  number("received", (w) => w.received_bytes_per_s, bytesPerSecond, "KV from other workers"),
  BY,
  number("step", (w) => w.step_s, seconds, "Mean time of one pass of the engine", none),
];

const COLUMNS = {
  prefill: columns(QUEUED, "Prompt tokens computed per second"),
  decode: columns(ACCEPTED, "Tokens generated per second"),
};

export const ROLES = Object.keys(COLUMNS);

// Rows without a value are last in both directions; equal ones are ordered by their names.
export const sorted = (workers, column, down) => {
  const value = (w) => (w.state === "silent" && !column.textual ? null : (column.rank ?? column.of)(w));
  const order = (a, b) => {
    const [left, right] = [value(a), value(b)];
    const name = a.instance < b.instance ? -1 : 1;
    if (left === right) return name;
    if (left === null || right === null) return left === null ? 1 : -1;
    return (left < right ? -1 : 1) * (down ? -1 : 1);
  };
  return [...workers].sort(order);
};

export class WorkerTable {
  constructor(role, title) {
    this.columns = COLUMNS[role];
    this.workers = [];
    this.by = STATE; // what needs attention comes first
    this.down = false;
    this.open = false;
    this.heads = this.columns.map((column) => this.head(column));
    this.whole = this.row("all");
    const top = make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...this.heads));
    const all = make("tbody", { role: "rowgroup", class: "all" }, this.whole);
    this.body = make("tbody", { role: "rowgroup" });
    const about = { role: "table", "aria-labelledby": title.id };
    this.table = make("table", about, top, all, this.body);
    this.fold = make("button", { type: "button", "aria-expanded": "false" });
    this.fold.addEventListener("click", () => this.turn({ open: !this.open }));
    this.nodes = [this.table, this.fold];
  }

  head(column) {
    const button = make("button", { type: "button" }, column.name);
    const about = column.about ? { title: column.about } : {};
    button.addEventListener("click", () => {
      this.turn({ by: column, down: this.by === column ? !this.down : !column.textual });
    });
    return make("th", { scope: "col", role: "columnheader", ...about }, button);
  }

  // Roles are repeated, because some browsers take a table that is laid out as cards for no table.
  row(name) {
    const [first, ...others] = this.columns.map((column) => column.name);
    const cells = others.map((each) =>
      make("td", { role: "cell", "data-label": each, ...(each === "host" && { class: each }) }),
    );
    const about = { scope: "row", role: "rowheader", "data-label": first };
    const head = make("th", about, make("code", {}, name));
    return make("tr", { role: "row" }, head, ...cells);
  }

  turn(change) {
    Object.assign(this, change);
    this.show(this.workers);
  }

  show(workers) {
    this.workers = workers;
    const many = workers.length > MANY;
    const rows = sorted(workers, this.by, this.down);
    const shown = many && !this.open ? rows.slice(0, FOLDED) : rows;
    this.table.classList.toggle("many", many);
    this.whole.parentElement.hidden = workers.length < 2;
    this.fold.hidden = !many;
    this.fold.setAttribute("aria-expanded", String(this.open));
    say(this.fold, this.open ? `Show ${FOLDED} workers` : `Show all ${workers.length} workers`);
    this.heads.forEach((head, i) => {
      if (this.columns[i] !== this.by) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
    });
    this.sum();
    const create = (worker) => this.row(short(worker.instance));
    keyed(this.body, shown, (w) => w.instance, create, (row, w) => this.fill(row, w));
  }

  sum() {
    const seen = this.workers.filter((w) => w.state !== "silent");
    this.columns.forEach((column, i) => {
      const cell = this.whole.cells[i];
      if (!i) say(cell.firstChild, column.all(this.workers));
      else if (column.textual) say(cell, column.all(this.workers));
      else showValue(cell, column, column.all(seen));
    });
  }

  fill(row, worker) {
    this.columns.forEach((column, i) => {
      const cell = row.cells[i];
      if (!i) return;
      if (column === STATE) state(cell, worker);
      else if (column === BY && worker.state === "silent") say(cell, "");
      else if (column.textual) say(cell, column.of(worker));
      else showValue(cell, column, worker.state === "silent" ? undefined : column.of(worker));
      if (column === BY) cell.title = reasons(worker);
    });
  }
}

const state = (cell, worker) => {
  const again = worker.engine_restarts;
  const lent = worker.home && worker.home !== worker.role;
  say(cell, worker.state + (lent ? ", lent" : "") + (again ? ` (+${again})` : ""));
  cell.className = `state-${worker.state}`;
  const from = lent ? [`Lent by the ${worker.home} pool`] : [];
  cell.title = [...from, ...(again ? [`Its engine was replaced ${again} times`] : [])].join(". ");
};

// undefined: nothing is known, so that nothing is shown.
const showValue = (cell, column, value) => {
  if (value === undefined) cell.replaceChildren();
  else if (column.bar) level(cell, value, column.form(value));
  else quantity(cell, column.form(value));
};

export const level = (cell, part, shown) => {
  if (!cell.querySelector(".bar")) {
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("i"));
    cell.replaceChildren(bar, make("span"));
  }
  cell.querySelector("i").style.width = `${100 * Math.min(1, part ?? 0)}%`;
  quantity(cell.lastChild, shown);
};
