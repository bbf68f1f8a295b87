// The page asks each two seconds while somebody looks, and says how old what it shows is.
//
//   asking --200--> showing      --401--> wants a key      --anything else--> says so, asks again
//   hidden or paused: asks nothing

import { at, say } from "./dom.js";
import { History } from "./history.js";
import { pools } from "./pools.js";
import { summary, word } from "./summary.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const STALE_S = 5;
const STORED = "baton.key";

const history = new History();
let key = stored();
let shownAt = null; // seconds of performance.now(), of the last figures
let paused = false;
let turn = 0; // only the newest chain of questions goes on
let timer;

function stored() {
  try {
    return sessionStorage.getItem(STORED);
  } catch {
    return null; // storage is forbidden: the key lives in this variable
  }
}

function keep(value) {
  key = value;
  try {
    value === null ? sessionStorage.removeItem(STORED) : sessionStorage.setItem(STORED, value);
  } catch {
    // As above.
  }
}

const now = () => performance.now() / 1000;

function start() {
  stop();
  if (!paused && !document.hidden) ask(turn);
}

function stop() {
  turn += 1;
  clearTimeout(timer);
}

async function ask(mine) {
  const problem = await look(mine);
  if (mine !== turn) return;
  trouble(problem);
  if (problem !== NEEDS_KEY) timer = setTimeout(ask, EVERY_MS, mine);
}

const NEEDS_KEY = "This page needs a key.";

// What is wrong, in a sentence; nothing where it went well.
async function look(mine) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  try {
    const reply = await fetch("ui/overview", {
      headers,
      cache: "no-store",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (mine !== turn) return "";
    if (reply.status === 401) return askForKey();
    if (!reply.ok) return `The router answers with status ${reply.status}.`;
    show(await reply.json());
    return "";
  } catch (error) {
    if (!(
      error instanceof TypeError ||
      error instanceof SyntaxError ||
      error.name === "TimeoutError"
    ))
      throw error;
    return "The router does not answer.";
  }
}

function show(seen) {
  const time = now();
  // Another router behind the same address knows no past yet: a moment, and it does.
  if (seen.window_s === null && shownAt !== null && time - shownAt < 10) return;
  shownAt = time;
  at("ask").hidden = true;
  at("main").hidden = at("pause").hidden = false;
  at("forget").hidden = key === null;
  summary(seen);
  pools(seen);
  history.take(time, seen);
  document.title = `${word(seen)} – ${seen.model} – Baton`;
}

function trouble(problem) {
  const shown = problem && problem !== NEEDS_KEY;
  say(
    at("notice"),
    shown
      ? `${problem} ${shownAt === null ? "Asking" : "What is shown is old. Asking"} again every ${EVERY_MS / 1000} s.`
      : "",
  );
  at("notice").hidden = !shown;
  if (shown) document.title = "No answer – Baton";
  age(Boolean(problem));
}

function age(gone) {
  const old = shownAt === null ? null : now() - shownAt;
  const asking = at("main").hidden ? "" : "live";
  const said = old === null ? "" : `${old.toFixed(0)} s old`;
  const stale = old !== null && old > STALE_S;
  at("age").className = `age ${paused ? "" : gone || stale ? "gone" : asking}`;
  at("main").classList.toggle("old", gone || stale);
  say(
    at("age"),
    paused ? `paused, ${said}` : gone || stale ? said || "no answer" : asking || "connecting",
  );
}

function askForKey() {
  say(
    at("wrong"),
    key === null ? "" : "This key is not known here. Is it of this server, and whole?",
  );
  keep(null);
  shownAt = null;
  at("main").hidden = at("pause").hidden = at("forget").hidden = true;
  at("ask").hidden = false;
  at("key").value = "";
  at("key").focus();
  document.title = "API key – Baton";
  return NEEDS_KEY;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    say(at("wrong"), "A key has no spaces, and only letters, digits and signs of ASCII.");
    return;
  }
  say(at("wrong"), "");
  keep(given);
  start();
});

at("forget").addEventListener("click", () => {
  stop();
  keep(null);
  askForKey();
  age(false);
});

at("pause").addEventListener("click", () => {
  paused = !paused;
  say(at("pause"), paused ? "Go on" : "Pause");
  start();
  age(false);
});

document.addEventListener("visibilitychange", start);
setInterval(() => at("main").hidden || age(!at("notice").hidden), 1000);
start();
