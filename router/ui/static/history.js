// Five minutes of what was seen, kept in this page, and the charts over it.

import { Chart, SPAN_S } from "./chart.js";
import { at } from "./dom.js";
import { count, percent, perSecond, seconds } from "./format.js";
import { sum, usage } from "./workers.js";

const point = (now, { router, workers }) => {
  const of = (role) => workers.filter((w) => w.role === role && w.state !== "silent");
  return { at: now, router, prefill: of("prefill"), decode: of("decode") };
};

const tokens = (workers) => sum(workers, (w) => w.tokens_per_s);

// [chart, name of its objective]
const charts = () => {
  const spread = (name) => [
    ["p50", (p) => p.router[name].p50],
    ["p99", (p) => p.router[name].p99],
  ];
  const pools = (of) => [
    ["prefill", (p) => of(p.prefill)],
    ["decode", (p) => of(p.decode)],
  ];
  const requests = [
    ["ended", (p) => p.router.requests_per_s],
    ["in time", (p) => p.router.goodput_per_s],
  ];
  const inside = [
    ["running", (p) => p.router.running],
    ["waiting", (p) => p.router.waiting],
  ];
  return [
    [new Chart("TTFT", spread("ttft"), seconds), "ttft"],
    [new Chart("TPOT", spread("tpot"), seconds), "tpot"],
    [new Chart("Requests", requests, perSecond)],
    [new Chart("Tokens", pools(tokens), perSecond)],
    [new Chart("In flight", inside, count)],
    [new Chart("KV in use", pools(usage), percent, 1)],
  ];
};

export class History {
  constructor() {
    this.points = [];
    this.charts = charts();
    at("charts").append(...this.charts.map(([chart]) => chart.node));
  }

  // now: seconds of this page's clock.
  take(now, seen) {
    if (seen.window_s !== null) this.points.push(point(now, seen));
    while (this.points.length && now - this.points[0].at > SPAN_S) this.points.shift();
    for (const [chart, aim] of this.charts) {
      chart.draw(this.points, now, seen.router.objectives[aim] ?? null);
    }
  }
}
