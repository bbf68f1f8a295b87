// Draws where the time of one answer went: the whole answer with the arrival of its tokens, and the
// steps until its first token, enlarged.

import { make, svg } from "./dom.js";
import { seconds, text } from "./format.js";

const HEIGHT = 24;
const WIDTH = 1000; // units of the drawing; tokens that fall on the same one are one mark

// attempts: of the field "baton"; marks: seconds from the request's arrival at the router;
// arrivals: [seconds since it was sent, tokens so far], not empty; named: of an instance.
export const timeline = (node, { marks, attempts, arrivals, named }) => {
  node.replaceChildren(...whole(arrivals), ...beginning(steps(marks, attempts, arrivals[0][0], named)));
};

const whole = (arrivals) => {
  const [first, last] = [arrivals[0][0], arrivals.at(-1)[0]];
  const title = make("h3", {}, `The whole answer: ${text(seconds(last))}`);
  const drawing = svg("svg", {
    class: "ticks",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  drawing.append(svg("path", { d: ticks(arrivals.map(([at]) => at), last) }));
  const lead = make("i", { class: "s3" });
  place(lead, 0, first, last);
  const track = make("div", { class: "track tall", "aria-hidden": "true" }, lead, drawing);
  return [title, track, make("p", { class: "soft" }, rhythm(arrivals))];
};

// One line for each of the times, of which `last` is at the right end.
export const ticks = (times, last) => {
  const places = new Set(times.map((at) => Math.round((WIDTH * at) / last)));
  return [...places].map((x) => `M${x} 0V${HEIGHT}`).join("");
};

const rhythm = (arrivals) => {
  const start = `The first token arrived after ${text(seconds(arrivals[0][0]))}`;
  if (arrivals.length < 2) return `${start}.`;
  const gaps = arrivals.slice(1).map(([at], i) => at - arrivals[i][0]);
  const span = arrivals.at(-1)[0] - arrivals[0][0];
  const more = arrivals.at(-1)[1] - arrivals[0][1];
  const pause = text(seconds(Math.max(...gaps)));
  const mean = text(seconds(span / more));
  const follow = more === 1 ? "one more token" : `${more} more tokens`;
  return `${start}, then ${follow}, ${mean} each on average. The longest pause was ${pause}.`;
};

// [name, where, class, start, end] of each step that happened, in seconds. `shown`: the first token
// reached this page.
export const steps = (marks, attempts, shown, named) => {
  const { chosen, observed } = attempts.find((a) => a.observed.ttft_s !== null) ?? attempts.at(-1);
  const source = observed.hand_over?.prefill_instance;
  const [decode, prefill] = [named(chosen.decode), named(source ?? chosen.decode)];
  const times = { ...marks, shown };
  return [
    ["routing", "router", "s1", "arrived", "routed"],
    ["queue", prefill, "s2", "routed", "prefill_started"],
    ["prefill", prefill, "s3", "prefill_started", "first_token"],
    ["delivery", "to this page", "s4", "first_token", "shown"],
    ["KV transfer", `to ${decode}`, "s5", "first_token", "kv_ready"],
    ["wait for a step", decode, "s2", "kv_ready", "decode_started"],
  ]
    .filter(([, , , from, to]) => from in times && to in times)
    .map(([name, where, colour, from, to]) => {
      const end = Math.max(times[from], times[to]);
      return [name, where, colour, times[from], end];
    });
};

const beginning = (found) => {
  const last = Math.max(...found.map((step) => step[4]));
  const rows = found.map(([name, where, colour, start, end]) => {
    const bar = make("i", { class: colour });
    place(bar, start, end, last);
    return make(
      "li",
      {},
      make("span", {}, name),
      make("span", { class: "soft" }, where),
      make("span", { class: "track", "aria-hidden": "true" }, bar),
      make("b", {}, text(seconds(end - start))),
    );
  });
  const title = make("h3", {}, `Its beginning, enlarged: ${text(seconds(last))}`);
  return [title, make("ol", { class: "steps" }, ...rows)];
};

const place = (bar, start, end, last) => {
  bar.style.left = `${(100 * start) / last}%`;
  bar.style.width = `${(100 * (end - start)) / last}%`;
};
