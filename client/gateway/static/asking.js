// The gateway's own interface: its models, and an answer as it comes.

const KEY = "anabranch-key";
const PLAIN_TOKENS = 256;
// Other visitors of this gateway cannot learn from the time whether this one asked the same.
const salt = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
// Models without a chat template, as this gateway said; they go on writing the text.
const plain = new Set();

// The key lives as long as the tab; where a browser keeps nothing, as long as the page.
let key = "";
try { key = sessionStorage.getItem(KEY) || ""; } catch { /* kept in this page alone */ }

export const hasKey = () => Boolean(key);

export function keepKey(text) {
  key = text;
  try { sessionStorage.setItem(KEY, text); } catch { /* kept in this page alone */ }
}

function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers });
}

async function refusal(response) {
  let text = `the gateway answered ${response.status}`, code = null;
  try {
    const { error } = await response.json();
    text = String(error.message) || text;
    code = error.code;
  } catch { /* no JSON */ }
  return Object.assign(new Error(text), { status: response.status, code });
}

// Raises with `status` where the gateway refuses.
export async function modelNames() {
  const response = await ask("v1/models");
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data.map((each) => String(each.id));
}

async function request(model, messages, temperature, signal) {
  const [path, said] = plain.has(model)
    ? ["v1/completions", { prompt: messages.map((each) => each.content).join(""), max_tokens: PLAIN_TOKENS }]
    : ["v1/chat/completions", { messages }];
  const body = { ...said, model, stream: true, cache_salt: salt,
    stream_options: { include_usage: true, include_route: true } };
  if (temperature !== null) body.temperature = temperature;
  const response = await ask(path, { method: "POST", signal,
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.code !== "no_chat_template" || plain.has(model)) throw error;
  plain.add(model);
  return request(model, messages, temperature, signal);
}

// The data of server-sent events; fields other than data are not used here.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}

// Tells `heard` of route, thoughts and text as they come; returns how it ended.
export async function answer(model, messages, temperature, signal, heard) {
  const response = await request(model, messages, temperature, signal);
  const ending = { usage: null, finish: null, plain: plain.has(model) };
  let whole = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") { whole = true; continue; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(String(chunk.error.message));
    if (chunk.usage) ending.usage = chunk.usage;
    if (chunk.route) heard.route(chunk.route);
    for (const choice of chunk.choices || []) {
      const { content, reasoning_content: thought } = choice.delta || { content: choice.text };
      if (choice.finish_reason) ending.finish = choice.finish_reason;
      if (thought) heard.thought(thought);
      if (content) heard.text(content);
    }
  }
  if (!whole) throw new Error("the gateway broke the answer off");
  return ending;
}
