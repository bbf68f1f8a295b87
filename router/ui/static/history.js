// Five minutes of what was seen, kept in this page, and the charts over it.

import { Chart } from "./chart.js";
import { at } from "./dom.js";
import { count, percent, perSecond, seconds } from "./format.js";

const SPAN_S = 300;

const sum = (workers, of) => workers.reduce((total, w) => total + (of(w) ?? 0), 0);

const usage = (workers) => {
  const room = sum(workers, (w) => w.kv_tokens);
  return room ? sum(workers, (w) => w.kv_usage * w.kv_tokens) / room : null;
};

const point = (now, { router, workers }) => {
  const of = (role) => workers.filter((w) => w.role === role && w.state !== "silent");
  const [prefill, decode] = [of("prefill"), of("decode")];
  return {
    at: now,
    ttft50: router.ttft.p50,
    ttft99: router.ttft.p99,
    tpot50: router.tpot.p50,
    tpot99: router.tpot.p99,
    requests: router.requests_per_s,
    goodput: router.goodput_per_s,
    computed: sum(prefill, (w) => w.tokens_per_s),
    generated: sum(decode, (w) => w.tokens_per_s),
    running: router.running,
    waiting: router.waiting,
    prefillKv: usage(prefill),
    decodeKv: usage(decode),
  };
};

const CHARTS = () => [
  [
    new Chart(
      "TTFT",
      [
        { name: "p50", of: (p) => p.ttft50 },
        { name: "p99", of: (p) => p.ttft99 },
      ],
      seconds,
    ),
    "ttft",
  ],
  [
    new Chart(
      "TPOT",
      [
        { name: "p50", of: (p) => p.tpot50 },
        { name: "p99", of: (p) => p.tpot99 },
      ],
      seconds,
    ),
    "tpot",
  ],
  [
    new Chart(
      "Requests",
      [
        { name: "ended", of: (p) => p.requests },
        { name: "in time", of: (p) => p.goodput },
      ],
      perSecond,
    ),
  ],
  [
    new Chart(
      "Tokens",
      [
        { name: "prefill", of: (p) => p.computed },
        { name: "decode", of: (p) => p.generated },
      ],
      perSecond,
    ),
  ],
  [
    new Chart(
      "In the router",
      [
        { name: "running", of: (p) => p.running },
        { name: "waiting", of: (p) => p.waiting },
      ],
      count,
    ),
  ],
  [
    new Chart(
      "KV in use",
      [
        { name: "prefill", of: (p) => p.prefillKv },
        { name: "decode", of: (p) => p.decodeKv },
      ],
      percent,
      { top: 1 },
    ),
  ],
];

export class History {
  constructor() {
    this.points = [];
    this.charts = CHARTS();
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
