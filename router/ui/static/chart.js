// A chart of five minutes: lines over time, drawn as SVG; gaps where nothing was seen.

import { make, quantity, say, svg } from "./dom.js";
import { text } from "./format.js";

const WIDTH = 300;
const HEIGHT = 80;
const SPAN_S = 300;
const GAP_S = 10;

// 1, 2 or 5 times a power of ten, not below `value`.
const nice = (value) => {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
};

// lines: [{name, of: (point) => number | null}], form: number -> [number, unit];
// aim: the objective, drawn where it is near; top: the scale's end where it is known.
export class Chart {
  constructor(title, lines, form, { top = null } = {}) {
    this.title = title;
    this.lines = lines;
    this.form = form;
    this.top = top;
    this.keys = lines.map(() => make("span"));
    this.aim = make("span", { class: "key aim", hidden: "" });
    const named = lines.map((line, i) =>
      make("span", { class: i ? "key second" : "key" }, `${line.name} `, this.keys[i]),
    );
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
    });
    this.area = this.path("area");
    this.path("grid").setAttribute(
      "d",
      `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}`,
    );
    this.aimLine = this.path("aim");
    this.paths = lines.map((_, i) => this.path(`line${i}`));
    this.scale = make("span", { class: "top", "aria-hidden": "true" });
    const axis = make(
      "div",
      { class: "axis", "aria-hidden": "true" },
      make("span", {}, "5 min ago"),
      make("span", {}, "now"),
    );
    this.node = make(
      "figure",
      { class: "card" },
      make("figcaption", {}, make("h3", {}, title), ...named, this.aim),
      make("div", { class: "plot" }, this.drawing, this.scale),
      axis,
    );
  }

  path(name) {
    const made = svg("path", { class: name });
    this.drawing.append(made);
    return made;
  }

  // points: [{at: seconds, ...}], oldest first.
  draw(points, now, aim = null) {
    const values = this.lines.map((line) => points.map((p) => line.of(p) ?? null));
    const highest = Math.max(0, ...values.flat().filter((v) => v !== null));
    const near = aim !== null && aim <= 3 * highest;
    const top = this.top ?? nice(Math.max(highest * 1.05, near ? aim * 1.1 : 0));
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN_S)).toFixed(1);
    const y = (value) => (HEIGHT - (HEIGHT * value) / top).toFixed(1);
    const runs = values.map((of) => stretches(points, of));
    runs.forEach((of, i) =>
      this.paths[i].setAttribute(
        "d",
        of.map((run) => "M" + run.map(([at, v]) => `${x(at)} ${y(v)}`).join("L")).join(""),
      ),
    );
    this.area.setAttribute(
      "d",
      runs[0]
        .map(
          (run) =>
            `M${x(run[0][0])} ${HEIGHT}L${run.map(([at, v]) => `${x(at)} ${y(v)}`).join("L")}L${x(run.at(-1)[0])} ${HEIGHT}Z`,
        )
        .join(""),
    );
    this.aimLine.setAttribute("d", near ? `M0 ${y(aim)}H${WIDTH}` : "");
    this.aim.hidden = aim === null;
    say(this.aim, aim === null ? "" : `objective ${text(this.form(aim))}${near ? "" : " (above)"}`);
    say(this.scale, highest || this.top ? text(this.form(top)) : "");
    this.lines.forEach((_, i) => quantity(this.keys[i], this.form(values[i].at(-1))));
    this.drawing.setAttribute("aria-label", this.words(values));
  }

  words(values) {
    const parts = this.lines.map((line, i) => {
      const seen = values[i].filter((v) => v !== null);
      if (!seen.length) return `${line.name}: nothing seen`;
      const [now, low, high] = [values[i].at(-1), Math.min(...seen), Math.max(...seen)].map((v) =>
        text(this.form(v)),
      );
      return `${line.name}: now ${now}, from ${low} to ${high}`;
    });
    return `${this.title}, last five minutes. ${parts.join(". ")}.`;
  }
}

// Runs of points that belong together.
const stretches = (points, values) => {
  const runs = [];
  let last = -Infinity;
  points.forEach(({ at }, i) => {
    const broken = at - last > GAP_S;
    last = values[i] === null ? -Infinity : at;
    if (values[i] === null) return;
    if (broken) runs.push([]);
    runs.at(-1).push([at, values[i]]);
  });
  return runs;
};
