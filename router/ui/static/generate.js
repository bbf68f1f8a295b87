// Sends one prompt and reads the streamed answer.

import { authorization } from "./key.js";
import { EventParser } from "./sse.js";

const HEADERS = {
  "Content-Type": "application/json",
  "x-baton-explain": "1",
  "x-baton-timeline": "1",
};
const CUT = "The connection was lost before the answer was complete.";
const NO_STREAM = "The server did not answer with a stream.";
const SILENT = "The router does not answer.";

// Why there is no answer, or only a part of one. `status` is null inside of a stream.
export class Failure extends Error {
  constructor(message, { status = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, code });
  }
}

// Returns the id of the served model. Throws Failure, or AbortError.
export async function servedModel(key, signal) {
  const reply = await send("v1/models", { headers: authorization(key), signal });
  const [first] = (await parsed(reply))?.data ?? [];
  if (!first?.id) throw new Failure("The router names no model.");
  return first.id;
}

// Yields what each event adds: { text, reasoning, tokens, finish, baton }, of which `tokens` counts
// all so far. asked: { kind: "chat" | "text", model, prompt, limit, temperature: number | null }.
// Throws Failure, or AbortError once `signal` is.
export async function* generate(asked, key, signal) {
  const [path, body] = request(asked);
  const headers = { ...HEADERS, ...authorization(key) };
  const reply = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!/^text\/event-stream\b/.test(reply.headers.get("content-type"))) throw new Failure(NO_STREAM);
  for await (const data of events(reply, signal)) {
    if (data === "[DONE]") return;
    yield added(JSON.parse(data));
  }
  throw new Failure(CUT);
}

const request = ({ kind, model, prompt, limit, temperature }) => {
  const options = { include_usage: true, continuous_usage_stats: true };
  const body = { model, stream: true, stream_options: options };
  if (temperature !== null) body.temperature = temperature;
  if (kind === "text") return ["v1/completions", { ...body, prompt, max_tokens: limit }];
  const messages = [{ role: "user", content: prompt }];
  return ["v1/chat/completions", { ...body, messages, max_completion_tokens: limit }];
};

const added = ({ error, choices, usage, baton }) => {
  if (error) throw new Failure(`The answer broke off with an error: ${told(error)}`, error);
  const { delta = {}, text, finish_reason: finish } = choices?.[0] ?? {};
  return {
    text: text ?? delta.content ?? "",
    reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
    tokens: usage?.completion_tokens ?? null,
    finish: finish ?? null,
    baton: baton ?? null,
  };
};

// Returns a reply with status 200.
async function send(path, options) {
  const reply = await unlessLost(fetch(path, { cache: "no-store", ...options }), SILENT);
  if (reply.ok) return reply;
  const error = (await parsed(reply))?.error;
  const { status } = reply;
  if (!error?.message) throw new Failure(`The server answered with status ${status}.`, { status });
  const wait = reply.headers.get("retry-after");
  const again = /^\d+$/.test(wait ?? "") ? ` Try again in ${wait} s.` : "";
  const message = `The server refused the prompt with status ${status}: ${told(error)}${again}`;
  throw new Failure(message, { status, code: error.code });
}

const told = ({ message, code }) => {
  const sentence = String(message).replace(/\.?$/, ".");
  return code ? `${sentence} (${code})` : sentence;
};

// Returns the JSON of a reply; null where it is none.
async function parsed(reply) {
  const text = await unlessLost(reply.text(), CUT);
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

async function* events(reply, signal) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  try {
    for (;;) {
      const { done, value } = await unlessLost(reader.read(), CUT);
      signal.throwIfAborted();
      yield* parser.push(decoder.decode(value, { stream: !done }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // it has failed or ended already
  }
}

// The browser reports each failure of the network as a TypeError.
const unlessLost = async (waited, message) => {
  try {
    return await waited;
  } catch (error) {
    throw error instanceof TypeError ? new Failure(message) : error;
  }
};
