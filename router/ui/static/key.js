// The API key of this page. It is held in memory only, and sent to this server only.

let held = null;

export const key = () => held;

// A header accepts no other characters.
export const isKey = (given) => /^[\x21-\x7e]+$/.test(given);

export const keep = (given) => {
  if (isKey(given)) held = given;
  return isKey(given);
};

export const forget = () => {
  held = null;
};

export const authorization = (given) => (given ? { Authorization: `Bearer ${given}` } : {});
