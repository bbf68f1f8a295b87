// Is it fine, how fast is it, and what became of the requests?

import { at, keyed, make, quantity, say } from "./dom.js";
import { count, duration, percent, perSecond, seconds, text } from "./format.js";

const WORDS = { fine: "Fine", strained: "Strained", down: "Down" };
const STAGES = {
  route: "routing",
  queue: "queue",
  prefill: "prefill",
  first_emit: "first emit",
  wire: "wire",
  scatter: "scatter",
};
const AFTER = ["wire", "scatter"];

export const summary = (seen) => {
  head(seen);
  verdict(seen);
  tiles(seen.router);
  latency(seen.router);
  stages(seen.router.stages);
  requests(seen.router);
};

export const word = (seen) => (idle(seen) ? "Fine, and idle" : WORDS[seen.verdict.level]);

const idle = ({ verdict, router, window_s }) =>
  verdict.level === "fine" &&
  window_s !== null &&
  !router.running &&
  !router.waiting &&
  !total(router.requests);

const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);

const head = ({ model, cluster, router, window_s }) => {
  say(at("model"), model);
  const routers = router.replicas === 1 ? "" : `, ${router.replicas} routers`;
  const up = router.uptime_s === null ? "" : `, up ${duration(router.uptime_s)}`;
  say(at("where"), `cluster ${cluster}${routers}${up}`);
  const of =
    window_s === null ? "since each process started" : `of the last ${window_s.toFixed(0)} s`;
  say(
    at("window"),
    `Rates, times and ratios are ${of}, of all routers together. Tokens are those computed on prefill workers, and those generated on decode workers.`,
  );
};

const verdict = (seen) => {
  const { level, reasons } = seen.verdict;
  at("verdict").parentElement.className = `card fine fine-${level}`;
  say(at("verdict"), word(seen));
  keyed(
    at("reasons"),
    reasons.length ? reasons : [calm(seen)],
    (_, i) => i,
    () => make("li"),
    say,
  );
};

const calm = (seen) => {
  const ended = total(seen.router.requests);
  if (seen.window_s === null) return "every worker is there";
  const of = `in the last ${seen.window_s.toFixed(0)} s`;
  return ended
    ? `${text(count(ended))} ${ended === 1 ? "request" : "requests"} ended ${of}`
    : `no request ended ${of}`;
};

const tiles = (router) => {
  const shown = [
    ["in time", percent(router.slo.all)],
    ["goodput", perSecond(router.goodput_per_s)],
    ["requests", perSecond(router.requests_per_s)],
    ["output tokens", perSecond(router.output_tokens_per_s)],
    ["running", count(router.running)],
    ["waiting", count(router.waiting)],
    ["cache hits", percent(router.hit_ratio)],
  ];
  const create = ([name]) => make("div", {}, make("dt", {}, name), make("dd"));
  keyed(
    at("tiles"),
    shown,
    ([name]) => name,
    create,
    (tile, [, value]) => quantity(tile.lastChild, value),
  );
};

const LATENCIES = [
  ["ttft", "TTFT", "Time to first token"],
  ["tpot", "TPOT", "Time per output token, mean of a request"],
  ["itl", "ITL", "Inter-token latency"],
];

const latency = (router) => {
  const create = ([, short, long]) => {
    const name = make("abbr", { title: long }, short);
    const cells = ["", "", "", "wide", ""].map((kind) => make("td", kind ? { class: kind } : {}));
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, name, make("span", { class: "soft" })),
      ...cells,
    );
  };
  keyed(
    at("latency").tBodies[0],
    LATENCIES,
    ([key]) => key,
    create,
    (row, [key]) => {
      const spread = router[key];
      const aim = router.objectives[key] ?? null;
      say(row.cells[0].lastChild, aim === null ? "" : `≤ ${text(seconds(aim))}`);
      ["p50", "p90", "p99", "mean"].forEach((name, i) => {
        quantity(row.cells[i + 1], seconds(spread[name]));
        flag(row.cells[i + 1], aim !== null && spread[name] > aim && name !== "mean");
      });
      quantity(row.cells[5], percent(aim === null ? null : router.slo[key]));
    },
  );
};

const flag = (cell, over) => {
  cell.classList.toggle("over", over);
  if (over) cell.append(make("span", { class: "only" }, " over the objective"));
};

const stages = (means) => {
  const first = Object.keys(STAGES).filter((name) => name in means && !AFTER.includes(name));
  const after = AFTER.filter((name) => name in means);
  const sum = first.reduce((total, name) => total + means[name], 0);
  const box = at("stages");
  if (!box.firstChild) {
    box.append(
      make("div", { class: "stack", "aria-hidden": "true" }),
      make("ol", { class: "parts" }),
      make("p", { class: "soft" }),
    );
  }
  const [stack, parts, note] = box.children;
  stack.hidden = !first.length;
  keyed(
    stack,
    first,
    (name) => name,
    (name) => make("i", { class: swatch(name) }),
    (part, name) => {
      part.style.flexGrow = sum ? means[name] / sum : 0;
    },
  );
  keyed(
    parts,
    first,
    (name) => name,
    legend,
    (item, name) => quantity(item.lastChild, seconds(means[name])),
  );
  const later = after.map((name) => `${STAGES[name]} ${text(seconds(means[name]))}`).join(" and ");
  say(
    note,
    first.length
      ? `Together ${text(seconds(sum))} in the mean.${later ? ` Then ${later} until the second token.` : ""}`
      : "No request yet.",
  );
};

const swatch = (name) => `s${Object.keys(STAGES).indexOf(name) + 1}`;

const legend = (name) =>
  make(
    "li",
    {},
    make("span", { class: `swatch ${swatch(name)}`, "aria-hidden": "true" }),
    STAGES[name],
    make("b"),
  );

const requests = ({ requests: ended, refusals }) => {
  const rows = [
    ...Object.entries(ended).map(([status, n]) => [
      status === "cancelled" ? "hung up" : status,
      n,
      status.startsWith("5"),
    ]),
    ...Object.entries(refusals).map(([reason, n]) => [`refused by ${reason}`, n, true]),
  ];
  const create = ([name]) => make("tr", {}, make("th", { scope: "row" }, name), make("td"));
  keyed(
    at("requests").tBodies[0],
    rows.length ? rows : [["none", null, false]],
    ([name]) => name,
    create,
    (row, [, n, bad]) => {
      quantity(row.cells[1], count(n));
      row.cells[1].classList.toggle("over", bad);
    },
  );
};
