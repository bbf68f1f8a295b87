// The API key of this tab: it ends with it, and goes to this server alone.

const NAME = "baton.key";

let held = null; // where storage is forbidden, too

try {
  held = sessionStorage.getItem(NAME);
} catch {
  // Forbidden: asked for anew after each reload.
}

export const key = () => held;

// Whether it can be one; a header takes no others.
export const keep = (given) => {
  if (!/^[\x21-\x7e]+$/.test(given)) return false;
  held = given;
  store((storage) => storage.setItem(NAME, given));
  return true;
};

export const forget = () => {
  held = null;
  store((storage) => storage.removeItem(NAME));
};

const store = (change) => {
  try {
    change(sessionStorage);
  } catch {
    // As above.
  }
};
