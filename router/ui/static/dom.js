// Elements. What comes from the server only ever becomes text.

import { text } from "./format.js";

export const at = (id) => document.getElementById(id);

export const make = (name, about = {}, ...inside) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(about)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
};

export const svg = (name, about = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(about)) made.setAttribute(key, value);
  return made;
};

// A text that stays the same is not touched, so that selections and screen readers are not disturbed.
export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const quantity = (node, pair) => {
  const shown = text(pair);
  if (node.textContent === shown) return;
  node.replaceChildren(pair[0], make("span", { class: "unit" }, shown.slice(pair[0].length)));
};

// One child for each item, by key; those that stay are updated in place.
export const keyed = (parent, items, key, create, update) => {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const now = items.map((item, i) => {
    const name = String(key(item, i));
    const child = old.get(name) ?? create(item);
    child.dataset.key = name;
    update(child, item);
    return child;
  });
  if (now.length !== parent.children.length || now.some((c, i) => parent.children[i] !== c)) {
    parent.replaceChildren(...now);
  }
};
