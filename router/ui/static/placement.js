// Shows why the router chose these workers: the predicted cost of each placement.

import { make } from "./dom.js";
import { count, percent, seconds, text } from "./format.js";
import { short } from "./workers.js";

const SHOWN = 6; // placements

// The terms of which the cost is the sum (router/placement/cost.py).
const TERMS = {
  ttft_cost: "time to the first token",
  tpot_cost: "time per token",
  imposed: "delay of other requests",
  eviction: "evicted cache",
};
const COLOURS = { ttft_cost: "s3", tpot_cost: "s2", imposed: "s1", eviction: "s4" };
const COLUMNS = [
  ["prefill", "Worker that computes the prompt"],
  ["decode", "Worker that generates the answer"],
  ["cached", "Prompt tokens expected in the prefix cache"],
  ["TTFT", "Predicted time to the first token"],
  ["TPOT", "Predicted time per output token"],
  ["cost", "Sum of the parts; the cheapest placement is chosen, at random among near-equal ones"],
];
const ROLES = ["rowheader", "cell", "cell", "cell", "cell", "cell"];

export const placement = (node, attempts, named) => {
  const last = attempts.at(-1);
  const lines = attempts.map((attempt, i) => {
    const which = attempts.length > 1 ? `Attempt ${i + 1} of ${attempts.length}: ` : "";
    return make("p", {}, which + sentence(attempt, named));
  });
  node.replaceChildren(...lines, legend(), table(last), ...rest(last));
};

const same = (a, b) => a.prefill === b.prefill && a.decode === b.decode;

const cached = ({ prefill, prefill_cached_tokens: p, decode_cached_tokens: d }) =>
  prefill === null ? d : p;

const sentence = ({ chosen, candidates, observed, tokens, decision_s: took }, named) => {
  const rank = 1 + candidates.findIndex((each) => same(each, chosen));
  const among = ["The only placement", "The cheapest", `Number ${rank} by cost`];
  const order = candidates.length === 1 ? 0 : rank === 1 ? 1 : 2;
  const of = order ? ` of ${candidates.length} placements` : "";
  const where =
    chosen.prefill === null
      ? `prefill and decode on ${named(chosen.decode)}`
      : `prefill on ${named(chosen.prefill)}, decode on ${named(chosen.decode)}`;
  const parts = [
    `${among[order]}${of}, chosen in ${text(seconds(took))}: ${where}.`,
    `${cached(chosen)} of ${tokens} prompt tokens were expected in the prefix cache.`,
    first(chosen, observed),
    moved(observed.hand_over),
  ];
  return parts.filter(Boolean).join(" ");
};

const first = ({ predicted }, { ttft_s: came }) => {
  const expected = `The first token was predicted after ${text(seconds(predicted.ttft_s))}`;
  return came === null ? `${expected}; none came.` : `${expected} and came after ${text(seconds(came))}.`;
};

const moved = (hand_over) => {
  if (!hand_over) return "";
  const size = text([(hand_over.kv_bytes / 1e6).toFixed(2), "MB"]);
  return `The KV of ${text(count(hand_over.kv_tokens))} tokens (${size}) was transferred.`;
};

const legend = () => {
  const items = Object.entries(TERMS).map(([term, about]) => {
    const swatch = make("span", { class: `swatch ${COLOURS[term]}`, "aria-hidden": "true" });
    return make("li", {}, swatch, about);
  });
  return make("ul", { class: "terms", "aria-label": "Parts of the cost" }, ...items);
};

const table = ({ candidates, chosen }) => {
  const shown = candidates.slice(0, SHOWN);
  if (!shown.some((each) => same(each, chosen))) shown.push(chosen);
  const most = Math.max(...shown.map(({ predicted }) => predicted.cost), Number.MIN_VALUE);
  const heads = COLUMNS.map(([name, title]) =>
    make("th", { scope: "col", role: "columnheader", title }, name),
  );
  const bars = make("th", { scope: "col", role: "columnheader", class: "wide-bar" }, "parts of the cost");
  const rows = shown.map((each) => row(each, same(each, chosen), most));
  return make(
    "table",
    { role: "table", "aria-label": "Predictions for each placement" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads, bars)),
    make("tbody", { role: "rowgroup" }, ...rows),
  );
};

const row = (candidate, isChosen, most) => {
  const { prefill, decode, predicted } = candidate;
  const values = [
    prefill === null ? "on decode" : short(prefill),
    short(decode) + (isChosen ? " (chosen)" : ""),
    text(count(cached(candidate))),
    text(seconds(predicted.ttft_s)),
    text(seconds(predicted.tpot_s)),
    predicted.cost.toPrecision(2),
  ];
  const cells = values.map((value, i) => {
    const scope = i ? {} : { scope: "row" };
    return make(i ? "td" : "th", { role: ROLES[i], "data-label": COLUMNS[i][0], ...scope }, value);
  });
  const parts = Object.keys(TERMS).map((term) => {
    const part = make("i", { class: COLOURS[term] });
    part.style.width = `${(100 * predicted[term]) / most}%`;
    return part;
  });
  const described = Object.entries(TERMS)
    .map(([term, about]) => `${about} ${text(percent(share(predicted, term)))}`)
    .join(", ");
  const bar = make("span", { class: "stacked", role: "img", "aria-label": described }, ...parts);
  bar.title = described;
  const cell = make("td", { role: "cell", class: "wide-bar" }, bar);
  return make("tr", { role: "row", class: isChosen ? "chosen" : "" }, ...cells, cell);
};

const share = ({ cost, ...terms }, term) => (cost ? terms[term] / cost : 0);

const rest = ({ candidates }) => {
  const more = candidates.length - SHOWN;
  return more > 0 ? [make("p", { class: "soft" }, `${more} more placements cost more.`)] : [];
};
