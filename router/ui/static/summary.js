// Is the cluster healthy, how much does it serve, and how did the requests end?

import { at, keyed, make, quantity, say } from "./dom.js";
import { count, duration, percent, perSecond, text } from "./format.js";

const UNKNOWN = "Unknown";
const OUT_OF_DATE = "the router does not answer, so all figures here are out of date";

const WORDS = { fine: "Healthy", strained: "Strained", down: "Down" };

export const summary = (seen) => {
  head(seen);
  verdict(seen);
  tiles(seen.router);
  requests(seen.router);
};

// While the router does not answer, nothing is known about the cluster.
export const unknown = () => {
  at("verdict").parentElement.className = "card fine fine-unknown";
  say(at("verdict").firstChild, UNKNOWN);
  keyed(at("reasons"), [OUT_OF_DATE], (_, i) => i, () => make("li"), say);
};

export const word = (seen) => (idle(seen) ? "Healthy, and idle" : WORDS[seen.verdict.level]);

const idle = ({ verdict: { level }, router, window_s }) =>
  level === "fine" && window_s !== null && !(router.running || router.waiting || total(router));

const total = ({ requests: ended }) => Object.values(ended).reduce((sum, n) => sum + n, 0);

const head = ({ model, cluster, router, window_s, autoscaler }) => {
  say(at("model"), model);
  const routers = router.replicas === 1 ? "" : `, ${router.replicas} routers`;
  const up = router.uptime_s === null ? "" : `, up ${duration(router.uptime_s)}`;
  const scaling = autoscaler ? `; the autoscaler ${autoscaler.text}` : "";
  say(at("where"), `cluster ${cluster}${routers}${up}${scaling}`);
  const since = window_s === null ? "since each process started" : `of ${last(window_s)}`;
  say(at("window"), `Rates, times and ratios are ${since}, all routers together.`);
};

const last = (window_s) => `the last ${window_s.toFixed(0)} s`;

const verdict = (seen) => {
  const { level, reasons } = seen.verdict;
  at("verdict").parentElement.className = `card fine fine-${level}`;
  say(at("verdict").firstChild, word(seen));
  const lines = reasons.length ? reasons : [calm(seen)];
  keyed(at("reasons"), lines, (_, i) => i, () => make("li"), say);
};

const calm = ({ window_s, router }) => {
  if (window_s === null) return "all workers are ready";
  const ended = total(router);
  const requests = ended === 1 ? "1 request" : `${ended ? text(count(ended)) : "no"} requests`;
  return `${requests} ended in ${last(window_s)}`;
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
  keyed(at("tiles"), shown, ([name]) => name, create, (tile, [, value]) => {
    quantity(tile.lastChild, value);
  });
};

const requests = ({ requests: ended, refusals }) => {
  const rows = [
    ...Object.entries(ended).map(([status, n]) => [STATUS[status] ?? status, n, /^5/.test(status)]),
    ...Object.entries(refusals).map(([reason, n]) => [`refused by ${reason}`, n, true]),
  ];
  const shown = rows.length ? rows : [["none", null, false]];
  const create = ([name]) => make("tr", {}, make("th", { scope: "row" }, name), make("td"));
  keyed(at("requests").tBodies[0], shown, ([name]) => name, create, (row, [, n, bad]) => {
    quantity(row.cells[1], count(n));
    row.cells[1].classList.toggle("over", bad);
  });
};

const STATUS = { cancelled: "client disconnected", ok: "ok" };
