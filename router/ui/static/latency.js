// How fast it is, and where the time to the first token goes.

import { at, keyed, make, quantity, say } from "./dom.js";
import { percent, seconds, text } from "./format.js";

const ROWS = [
  ["ttft", "TTFT", "Time to first token"],
  ["tpot", "TPOT", "Time per output token, mean of a request"],
  ["itl", "ITL", "Inter-token latency"],
];
const COLUMNS = ["p50", "p90", "p99", "mean"];
const STAGES = { route: "routing", queue: "queue", prefill: "prefill", first_emit: "first emit" };
const AFTER = { wire: "wire", scatter: "scatter" };

export const latency = (router) => {
  keyed(at("latency").tBodies[0], ROWS, ([key]) => key, line, (row, [key]) => {
    const aim = router.objectives[key] ?? null;
    say(row.cells[0].lastChild, aim === null ? "" : `≤ ${text(seconds(aim))}`);
    COLUMNS.forEach((name, i) => {
      const value = router[key][name];
      quantity(row.cells[i + 1], seconds(value));
      flag(row.cells[i + 1], aim !== null && value > aim && name !== "mean");
    });
    quantity(row.cells[5], percent(aim === null ? null : router.slo[key]));
  });
};

const line = ([, short, long]) => {
  const name = make("abbr", { title: long }, short);
  const head = make("th", { scope: "row" }, name, make("span", { class: "soft" }));
  const cells = COLUMNS.map((each) => make("td", each === "mean" ? { class: "wide" } : {}));
  return make("tr", {}, head, ...cells, make("td"));
};

const flag = (cell, over) => {
  cell.classList.toggle("over", over);
  if (over) cell.append(make("span", { class: "only" }, " over the objective"));
};

// means: seconds by stage.
export const stages = (means) => {
  const [stack, parts, note] = at("stages").children;
  const first = Object.keys(STAGES).filter((name) => name in means);
  const sum = first.reduce((total, name) => total + means[name], 0);
  stack.hidden = !first.length;
  keyed(stack, first, (name) => name, piece, (part, name) => {
    part.style.flexGrow = sum ? means[name] / sum : 0;
  });
  keyed(parts, first, (name) => name, legend, (item, name) => {
    quantity(item.lastChild, seconds(means[name]));
  });
  const after = Object.keys(AFTER).filter((name) => name in means);
  const later = after.map((name) => `${AFTER[name]} ${text(seconds(means[name]))}`).join(" and ");
  const then = later && ` Then ${later} until the second token.`;
  const together = `Together ${text(seconds(sum))} on average.${then}`;
  say(note, first.length ? together : "No first token in this time.");
};

const colour = (name) => `s${Object.keys(STAGES).indexOf(name) + 1}`;

const piece = (name) => make("i", { class: colour(name) });

const legend = (name) => {
  const swatch = make("span", { class: `swatch ${colour(name)}`, "aria-hidden": "true" });
  return make("li", {}, swatch, STAGES[name], make("b"));
};
