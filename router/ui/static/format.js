// Numbers as people read them: three digits and a unit. null: not observed.

const trimmed = (value, places) => value.toFixed(places).replace(/\.?0+$/, "");

const digits = (value) => {
  if (value >= 100) return value.toFixed(0);
  return trimmed(value, value >= 10 ? 1 : 2);
};

const scaled = (value, unit) => {
  for (const [size, prefix] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (value >= size) return [digits(value / size), prefix + unit];
  }
  return [digits(value), unit];
};

// Each gives [number, unit]; a missing value is a dash.
const missing = (form) => (value) =>
  value === null || value === undefined ? ["–", ""] : form(value);

export const seconds = missing((s) =>
  s < 1e-3 ? [(s * 1e6).toFixed(0), "µs"] : s < 1 ? [digits(s * 1e3), "ms"] : [digits(s), "s"],
);
// Neither all nor nothing by rounding.
export const percent = missing((p) => {
  if (p > 0.9 && p < 1) return [Math.min(100 * p, 99.9).toFixed(1), "%"];
  return [p > 0 && p < 0.1 ? trimmed(Math.max(100 * p, 0.1), 1) : (100 * p).toFixed(0), "%"];
});
export const count = missing((n) => (n < 1e4 ? [n.toFixed(0), ""] : scaled(n, "")));
export const perSecond = missing((n) => scaled(n, "/s"));
export const bytesPerSecond = missing((n) =>
  n < 1e9 ? [digits(n / 1e6), "MB/s"] : [digits(n / 1e9), "GB/s"],
);

// A narrow space, at which no line breaks, before units, but none before % and /s.
export const text = ([number, unit]) => number + (/^[a-zµ]/i.test(unit) ? "\u202f" : "") + unit;

export const duration = (s) => {
  const parts = [];
  let left = Math.floor(s);
  for (const [size, unit] of [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ]) {
    const whole = Math.floor(left / size);
    left -= whole * size;
    if (whole || (unit === "s" && !parts.length)) parts.push(`${whole} ${unit}`);
  }
  return parts.slice(0, 2).join(" ");
};
