// The page asks for the overview every two seconds while it is visible, and says how old its figures
// are.
//
//   asking --200--> showing      --401--> wants a key      --anything else--> says so, asks again
//          --403--> the key may send prompts only: no figures, nothing is asked
//   showing fails: another version's, offers to reload      hidden or paused: asks nothing

import { at, make, say } from "./dom.js";
import { History } from "./history.js";
import { authorization, forget, key, keep } from "./key.js";
import { latency, stages } from "./latency.js";
import { pools } from "./pools.js";
import { summary, unknown, word } from "./summary.js";
import { know, reset } from "./try.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const STALE_S = 7;
const NEEDS_KEY = Symbol("key");
const NO_FIGURES = Symbol("no figures");
const OUTDATED = "This page is of another version than the router, and cannot show its figures.";

const history = new History();
let shownAt = null; // in seconds of now(); null: nothing is shown
let problem = ""; // with the last question
let paused = false;
let turn = 0; // only the newest chain of questions goes on
let timer;

const reload = make("button", { type: "button" }, "Reload");

const now = () => performance.now() / 1000;

function start() {
  turn += 1;
  clearTimeout(timer);
  if (!paused && !document.hidden) ask(turn);
}

async function ask(mine) {
  const found = await look();
  if (mine !== turn) return;
  if (found === NEEDS_KEY) return askForKey();
  if (found === NO_FIGURES) return showPromptOnly();
  trouble(found.wrong ?? attempt(found.seen));
  timer = setTimeout(ask, EVERY_MS, mine);
}

// { seen }, or what is { wrong }, in a sentence.
async function look() {
  const headers = authorization(key());
  const signal = AbortSignal.timeout(PATIENCE_MS);
  try {
    const reply = await fetch("ui/overview", { headers, cache: "no-store", signal });
    if (reply.status === 403 && key() !== null) return NO_FIGURES;
    if (reply.status === 401 || reply.status === 403) return NEEDS_KEY;
    if (!reply.ok) return { wrong: `The router answers with status ${reply.status}.` };
    return { seen: await reply.json() };
  } catch (error) {
    const expected = ["AbortError", "SyntaxError", "TimeoutError", "TypeError"];
    if (!expected.includes(error.name)) throw error;
    return { wrong: "The router does not answer." };
  }
}

// What is wrong; empty where it is shown.
function attempt(seen) {
  try {
    show(seen);
    return "";
  } catch (error) {
    console.error(error);
    return OUTDATED;
  }
}

function show(seen) {
  // Another router behind the same address has no past yet: a moment, and it does.
  if (seen.window_s === null && shownAt !== null && now() - shownAt < STALE_S) return;
  const time = now();
  summary(seen);
  latency(seen.router);
  stages(seen.router.stages);
  pools(seen);
  know(seen);
  history.take(time, seen);
  shownAt = time;
  at("ask").hidden = true;
  at("main").hidden = at("pause").hidden = false;
  at("main").classList.remove("bare");
  at("forget").hidden = key() === null;
  document.title = `${word(seen)} · ${seen.model} · Baton`;
}

function trouble(found) {
  problem = found;
  const old = shownAt === null ? "" : " The figures below are out of date.";
  const line = found && `${found}${old} Asking again every ${EVERY_MS / 1000} s.`;
  if (found !== OUTDATED) say(at("notice"), line);
  else if (!at("notice").contains(reload)) at("notice").replaceChildren(`${line} `, reload);
  if (found && found !== OUTDATED) unknown();
  if (found) document.title = `${found === OUTDATED ? "Reload" : "No answer"} · Baton`;
  age();
}

function age() {
  const old = shownAt === null ? null : now() - shownAt;
  const gone = !paused && (problem !== "" || old > STALE_S);
  at("age").className = `age ${gone ? "gone" : old !== null && !paused ? "live" : ""}`;
  at("main").classList.toggle("old", gone);
  const since = old === null ? "" : `${old.toFixed(0)} s old`;
  if (paused) say(at("age"), `paused, ${since}`);
  else if (gone) say(at("age"), since || "no answer");
  else say(at("age"), old === null ? "" : "live");
}

function showPromptOnly() {
  trouble("");
  say(at("notice"), "This key may send prompts. It shows no figures, because it lacks the scope monitor.");
  say(at("age"), "");
  at("ask").hidden = at("pause").hidden = true;
  at("main").hidden = at("forget").hidden = false;
  at("main").classList.add("bare");
  document.title = "Try it · Baton";
}

function askForKey() {
  const wrong = "The server does not know this key. Check that it is complete and belongs to this server.";
  say(at("wrong"), key() === null ? "" : wrong);
  forget();
  reset();
  shownAt = null;
  trouble("");
  at("main").hidden = at("pause").hidden = at("forget").hidden = true;
  at("ask").hidden = false;
  at("key").value = "";
  at("key").focus();
  document.title = "API key · Baton";
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const kept = keep(at("key").value.trim());
  say(at("wrong"), kept ? "" : "A key consists of printable ASCII characters without spaces.");
  if (kept) start();
});

at("forget").addEventListener("click", () => {
  turn += 1;
  clearTimeout(timer);
  forget();
  askForKey();
});

reload.addEventListener("click", () => location.reload());

at("pause").addEventListener("click", () => {
  paused = !paused;
  say(at("pause"), paused ? "Resume" : "Pause");
  start();
  age();
});

document.addEventListener("visibilitychange", start);
setInterval(age, 1000);
start();
