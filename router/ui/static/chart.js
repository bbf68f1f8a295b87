// A chart of five minutes: lines over time, drawn as SVG, and the same in words; gaps where
// nothing was seen.

import { make, quantity, say, svg } from "./dom.js";
import { text } from "./format.js";

export const SPAN_S = 300;
const GAP_S = 10;
const WIDTH = 300;
const HEIGHT = 80;
const HIDDEN = { "aria-hidden": "true" };

export class Chart {
  // lines: [[name, of a point: number | null]]; form: number -> [number, unit];
  // top: the end of the scale, where it is known.
  constructor(title, lines, form, top = null) {
    Object.assign(this, { title, lines, form, top });
    const box = `0 0 ${WIDTH} ${HEIGHT}`;
    this.drawing = svg("svg", { viewBox: box, preserveAspectRatio: "none", role: "img" });
    this.area = this.path("area");
    this.path("grid").setAttribute("d", [0.5, HEIGHT / 2, HEIGHT - 0.5].map(across).join(""));
    this.aimLine = this.path("aim");
    this.paths = lines.map((_, i) => this.path(`line${i}`));
    this.scale = make("span", { class: "top", ...HIDDEN });
    this.now = lines.map(() => make("span"));
    this.aim = make("span", { class: "key aim" });
    this.node = this.figure();
  }

  path(name) {
    const made = svg("path", { class: name });
    this.drawing.append(made);
    return made;
  }

  figure() {
    const keys = this.lines.map(([name], i) =>
      make("span", { class: i ? "key second" : "key" }, `${name} `, this.now[i]),
    );
    const caption = make("figcaption", {}, make("h3", {}, this.title), ...keys, this.aim);
    const plot = make("div", { class: "plot" }, this.drawing, this.scale);
    const ends = ["5 min ago", "now"].map((end) => make("span", {}, end));
    const axis = make("div", { class: "axis", ...HIDDEN }, ...ends);
    return make("figure", { class: "card" }, caption, plot, axis);
  }

  // points: [{at: seconds, ...}], oldest first; aim: the objective, drawn where it is near.
  draw(points, now, aim = null) {
    const values = this.lines.map(([, of]) => points.map((point) => of(point) ?? null));
    const highest = Math.max(0, ...values.flat());
    const near = aim !== null && aim <= 3 * highest;
    const top = this.top ?? nice(Math.max(highest * 1.05, near ? aim * 1.1 : 0));
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN_S)).toFixed(1);
    const placed = (run) => run.map(([at, value]) => [x(at), y(value)]);
    const runs = values.map((each) => stretches(points, each).map(placed));
    runs.forEach((each, i) => this.paths[i].setAttribute("d", each.map(through).join("")));
    this.area.setAttribute("d", runs[0].map(below).join(""));
    this.aimLine.setAttribute("d", near ? across(y(aim)) : "");
    this.aim.classList.toggle("off", !near);
    say(this.aim, aim === null ? "" : `≤ ${text(this.form(aim))}`);
    say(this.scale, highest || this.top ? text(this.form(top)) : "");
    values.forEach((each, i) => quantity(this.now[i], this.form(each.at(-1))));
    this.drawing.setAttribute("aria-label", this.words(values));
  }

  words(values) {
    const parts = this.lines.map(([name], i) => {
      const seen = values[i].filter((value) => value !== null);
      const [now, low, high] = [values[i].at(-1), Math.min(...seen), Math.max(...seen)];
      const said = (value) => text(this.form(value));
      const spread = `now ${said(now)}, from ${said(low)} to ${said(high)}`;
      return `${name}: ${seen.length ? spread : "nothing yet"}`;
    });
    return `${this.title}, last five minutes. ${parts.join(". ")}.`;
  }
}

const across = (y) => `M0 ${y}H${WIDTH}`;

const through = (run) => `M${run.map((place) => place.join(" ")).join("L")}`;

const below = (run) => `${through(run)}V${HEIGHT}H${run[0][0]}Z`;

// A round number, not below `value`.
const nice = (value) => {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
};

// Runs of [at, value] that belong together.
const stretches = (points, values) => {
  const runs = [];
  let last = -Infinity;
  points.forEach(({ at }, i) => {
    if (values[i] !== null) {
      if (at - last > GAP_S) runs.push([]);
      runs.at(-1).push([at, values[i]]);
    }
    last = values[i] === null ? -Infinity : at;
  });
  return runs;
};
