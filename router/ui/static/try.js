// "Try it": sends a prompt, shows the answer as it is generated, and where its time went.
//
//   idle --Send--> waiting --first text--> answering --end, Stop, or an error--> idle

import { at, keyed, make, quantity, say } from "./dom.js";
import { count, perSecond, seconds } from "./format.js";
import { Failure, generate, servedModel } from "./generate.js";
import { isKey, key } from "./key.js";
import { placement } from "./placement.js";
import { timeline } from "./timeline.js";
import { short } from "./workers.js";

const NO_TEMPLATE = "chat_template_missing";
const NO_KEY = "An API key consists of printable ASCII characters without spaces.";
const STOPPED = "Stopped. The router cancels the request.";
const ENDS = {
  stop: "The model has ended its answer.",
  length: "The answer has reached its limit of tokens.",
};

const DEMO = "baton-demo";
const OF_DEMO = "The demo model is small and has learned only Python: it continues the beginning of a program.";

let hosts = new Map(); // instance -> host
let told = false; // what the demo model can do
let running = null; // AbortController of the prompt that is being answered

// Takes the model and the hosts of workers from an overview.
export const know = (seen) => {
  hosts = new Map(seen.workers.map((w) => [w.instance, w.host]));
  say(at("try-model"), seen.model);
  if (told || seen.model !== DEMO) return;
  told = true;
  at("kind").value = "text";
  at("prompt").value ||= "def read_lines(path):";
  say(at("kind-note"), OF_DEMO);
};

const named = (instance) => {
  const host = hosts.get(instance);
  return host ? `${short(instance)} on ${host}` : short(instance);
};

// Drops the key, the answer and what is still being generated.
export const reset = () => {
  running?.abort();
  at("own-key").value = "";
  at("own").hidden = at("result").hidden = true;
  fail("");
};

const ownKey = () => at("own-key").value.trim() || null;

async function submit() {
  const given = ownKey();
  if (given && !isKey(given)) return fail(NO_KEY);
  const run = new AbortController();
  running = run;
  const answer = new Answer();
  busy(true);
  try {
    await answered(answer, given ?? key(), run.signal);
  } catch (error) {
    if (run.signal.aborted) answer.end(STOPPED);
    else failed(answer, error);
  } finally {
    answer.flush();
    running = null;
    busy(false);
  }
}

// Sends the prompt; a model without a chat template gets it as text to continue.
async function answered(answer, authorized, signal) {
  const model = await servedModel(authorized, signal);
  const asked = { ...form(), model };
  try {
    await answer.read(generate(asked, authorized, signal));
  } catch (error) {
    if (error.code !== NO_TEMPLATE || asked.kind === "text") throw error;
    at("kind").value = "text";
    at("kind").options[0].disabled = true;
    say(at("kind-note"), "The model has no chat template: the prompt is sent as text to continue.");
    await answer.read(generate({ ...asked, kind: "text" }, authorized, signal));
  }
}

const form = () => ({
  kind: at("kind").value,
  prompt: at("prompt").value,
  limit: at("limit").valueAsNumber,
  temperature: at("temperature").value === "" ? null : at("temperature").valueAsNumber,
});

function failed(answer, error) {
  if (!(error instanceof Failure)) console.error(error);
  const known = error instanceof Failure ? error.message : "The answer could not be read.";
  answer.end(answer.begun ? "The answer is not complete." : "");
  fail(known);
  if (error.status !== 401 && error.status !== 403) return;
  at("own").hidden = false;
  at("own-key").focus();
}

const fail = (message) => {
  say(at("failure"), message);
  if (message) at("failure").scrollIntoView({ block: "nearest" });
};

// The focus goes from the button that disappears to the one that appears.
function busy(is) {
  const [gone, shown] = is ? [at("go"), at("stop")] : [at("stop"), at("go")];
  const focused = document.activeElement === gone;
  shown.hidden = false;
  if (focused) shown.focus();
  gone.hidden = true;
  at("result").setAttribute("aria-busy", String(is));
}

// One answer on the page, from its request on. Times are seconds since then.
class Answer {
  constructor() {
    this.sent = performance.now();
    this.arrivals = []; // [seconds, tokens so far]
    this.pending = { text: "", reasoning: "" };
    this.tokens = 0;
    this.finish = this.baton = this.total = null;
    this.drawing = 0;
    fail("");
    this.text = clear(at("answer"));
    this.reasoning = clear(at("reasoning").lastElementChild);
    at("reasoning").hidden = true;
    at("anatomy").hidden = true;
    at("result").hidden = false;
    say(at("progress"), "Waiting for the first token.");
    this.timer = setInterval(() => this.figures(), 200);
    this.figures();
    at("figures").scrollIntoView({ block: "nearest" });
  }

  get begun() {
    return this.arrivals.length > 0;
  }

  now() {
    return (performance.now() - this.sent) / 1000;
  }

  // The clock starts here, so that the choice of the model does not count.
  async read(events) {
    this.sent = performance.now();
    for await (const event of events) this.take(event);
    this.end(ENDS[this.finish] ?? `The answer is complete (${this.finish}).`);
    if (this.baton) this.explain();
  }

  take({ text, reasoning, tokens, finish, baton }) {
    this.finish = finish ?? this.finish;
    this.baton = baton ?? this.baton;
    if (tokens !== null && tokens > this.tokens) {
      if (!this.begun) say(at("progress"), "The answer is being generated.");
      this.tokens = tokens;
      this.arrivals.push([this.now(), tokens]);
    }
    this.pending.text += text;
    this.pending.reasoning += reasoning;
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const { text, reasoning } = this.pending;
    this.pending = { text: "", reasoning: "" };
    append(this.text, text);
    append(this.reasoning, reasoning);
    if (reasoning) at("reasoning").hidden = false;
  }

  end(said) {
    clearInterval(this.timer);
    this.total = this.now();
    this.figures();
    say(at("progress"), said);
    at("result").hidden = !said;
  }

  figures() {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    const pace = this.arrivals.length > 1 ? (last[1] - first[1]) / (last[0] - first[0]) : null;
    const shown = [
      ["first token", seconds(first?.[0] ?? null)],
      ["tokens", count(this.tokens)],
      ["tokens per second", perSecond(pace)],
      ["total", seconds(this.total ?? this.now())],
    ];
    const create = ([name]) => make("div", {}, make("dt", {}, name), make("dd"));
    keyed(at("figures"), shown, ([name]) => name, create, (tile, [, value]) => {
      quantity(tile.lastChild, value);
    });
  }

  explain() {
    const { timeline: times, attempts } = this.baton;
    at("anatomy").hidden = false;
    timeline(at("timeline"), { marks: times[0], attempts, arrivals: this.arrivals, named });
    placement(at("placement"), attempts, named);
  }
}

const clear = (node) => {
  const text = document.createTextNode("");
  node.replaceChildren(text);
  return text;
};

// The end stays in view for a reader who has not scrolled back.
const append = (node, text) => {
  if (!text) return;
  const box = node.parentElement;
  const low = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
  node.appendData(text);
  if (low) box.scrollTop = box.scrollHeight;
};

at("send").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) submit();
});

at("stop").addEventListener("click", () => running?.abort());

at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("send").requestSubmit();
});
