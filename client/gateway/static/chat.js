"use strict";
// A chat over this gateway's own /v1. What peers, models and people wrote becomes text nodes alone.
const KEY = "anabranch-key";
const NEAR_END_PX = 90;
const PLAIN_TOKENS = 256;
const find = (id) => document.getElementById(id);
const talk = find("talk"), box = find("box"), send = find("send"), models = find("model");
// Other visitors of this gateway cannot learn from the time whether this one asked the same.
const salt = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
let conversation = { messages: [] };
let running = null;
let ready = false;

function make(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

// The key lives as long as the tab; where a browser keeps nothing, as long as the page.
let key = "";
try { key = sessionStorage.getItem(KEY) || ""; } catch { /* kept in this page alone */ }

function keep(text) {
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

function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

function showKey(open) {
  find("key").hidden = false;
  find("key").setAttribute("aria-expanded", String(open));
  find("keybox").hidden = !open;
  if (open) find("keyfield").focus(); else box.focus();
}

async function listModels() {
  try {
    const response = await ask("v1/models");
    if (response.status === 401) {
      if (key) notice("This key is not valid here.");
      showKey(true);
      return;
    }
    if (!response.ok) throw await refusal(response);
    const names = (await response.json()).data.map((each) => String(each.id));
    models.replaceChildren(...names.map((name) => {
      const option = make("option", "", name);
      option.value = name;
      return option;
    }));
    models.disabled = names.length < 2;
    ready = true;
    notice("");
    if (key) showKey(false);
  } catch (error) {
    notice(`The gateway’s models cannot be read: ${error.message}`);
  }
  settle();
}

// Paragraphs, fenced code and `code`: the rest of Markdown stays as it was written.
function blocks(text) {
  const found = [];
  text.split(/^```/m).forEach((part, at) => {
    if (at % 2) {
      const end = part.indexOf("\n");
      found.push(["pre", end < 0 ? "" : part.slice(end + 1).replace(/\n$/, "")]);
    } else {
      const plain = at ? part.replace(/^[^\n]*\n?/, "") : part;
      plain.split(/\n{2,}/).forEach((each) => { if (each.trim()) found.push(["p", each.replace(/^\n+|\n+$/g, "")]); });
    }
  });
  return found;
}

function block([tag, text]) {
  const made = make(tag);
  if (tag === "pre") {
    made.append(make("code", "", text));
    made.tabIndex = 0;
  } else {
    text.split(/`([^`\n]+)`/).forEach((part, at) => {
      if (part) made.append(at % 2 ? make("code", "", part) : part);
    });
  }
  return made;
}

// Writes anew what changed alone, so that a selection further up stays.
function writeBlocks(into, shown, text) {
  const wanted = blocks(text.trimStart());
  wanted.forEach((each, at) => {
    if (shown[at] && shown[at][0] === each[0] && shown[at][1] === each[1]) return;
    if (into.children[at]) into.children[at].replaceWith(block(each)); else into.append(block(each));
  });
  while (into.children.length > wanted.length) into.lastChild.remove();
  return wanted;
}

const place = (stage) => `${stage.peer} ${stage.start} ${stage.end}`;
const listed = (peers) => peers.map((each) => String(each.name)).join(", ");

function routeView() {
  const box = make("details", "route"), line = make("summary", "", "Route");
  const stages = make("ol", "stages"), event = make("p", "event");
  event.setAttribute("role", "status");
  box.append(line, stages, event);
  box.open = true;
  box.hidden = true;
  let before = null, fresh = new Set(), lost = [], rerouted = [], wasOpen = false;

  function tell(text, kind) {
    event.textContent = text;
    event.className = `event ${kind}`;
  }

  function say(route) {
    const waits = route.waits_for ? ` Waiting: ${route.waits_for}` : "";
    if (route.state === "open") {
      if (rerouted.length) tell(`Rerouted around ${listed(rerouted)}.`, "over");
      else tell(wasOpen ? "" : "Through these volunteers; the prompt is on its way…", "");
    } else if (lost.length && wasOpen) {
      tell(`${listed(lost)} left; rerouting…${waits}`, "now");
    } else if (lost.length) {
      tell(`${listed(lost)} did not take it; looking for another route…${waits}`, "now");
    } else {
      tell(`Looking for a route…${waits}`, waits ? "now" : "");
    }
  }

  function draw(route) {
    const gone = new Set(route.state === "open" ? [] : route.lost.map((each) => each.peer));
    stages.replaceChildren(...route.stages.map((each) => {
      const stage = make("li", "stage"), layers = each.end - each.start;
      stage.classList.toggle("gone", gone.has(each.peer));
      stage.classList.toggle("fresh", fresh.has(place(each)));
      stage.style.flexGrow = String(Math.max(1, layers));
      stage.title = `${each.name}: layers ${each.start} to ${each.end - 1}`;
      const span = layers === 1 ? `layer ${each.start}` : `layers ${each.start}–${each.end - 1}`;
      stage.append(make("span", "water"), make("span", "name", String(each.name)), make("span", "layers", span));
      return stage;
    }));
    const count = route.stages.length, times = route.failovers;
    line.textContent = (count ? `Route over ${count} ${count === 1 ? "volunteer" : "volunteers"}` : "Route")
      + (times ? ` · ${times === 1 ? "one" : times} left on the way` : "");
  }

  function show(route) {
    box.hidden = false;
    if (route.lost.length) lost = route.lost;
    if (route.state === "open") {
      // One that only moved, or was asked too early, may be on the route again.
      const here = new Set(route.stages.map((each) => each.peer));
      if (wasOpen && lost.length) rerouted = lost.filter((each) => !here.has(each.peer));
      lost = [];
      const places = route.stages.map(place);
      if (before && before.join() !== places.join()) fresh = new Set(places.filter((each) => !before.includes(each)));
      before = places;
    } else {
      fresh = new Set();
    }
    say(route);
    draw(route);
    stages.classList.toggle("flowing", route.state === "open");
    stages.classList.toggle("seeking", route.state !== "open");
    wasOpen = wasOpen || route.state === "open";
  }

  function flows() {
    if (!rerouted.length) tell("", "");
  }

  function end(failed) {
    stages.classList.remove("flowing");
    if (failed) tell(event.textContent.replace("; rerouting…", "."), "");
    else flows();
  }
  return { box, show, flows, end };
}

function answerView() {
  const box = make("article", "answer"), route = routeView();
  const thoughts = make("details", "thoughts"), thought = make("p");
  const text = make("div", "text"), foot = make("p", "foot");
  box.setAttribute("aria-label", "Answer");
  thoughts.append(make("summary", "", "Thoughts"), thought);
  thoughts.hidden = true;
  text.setAttribute("aria-live", "polite");
  text.setAttribute("aria-busy", "true");
  box.append(route.box, thoughts, text, foot);
  let shown = [], source = "", wanted = false;

  function draw() {
    wanted = false;
    follow(() => { shown = writeBlocks(text, shown, source); });
  }
  function write(more) {
    source += more;
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(draw);
  }
  function think(more) {
    thoughts.hidden = false;
    thought.append(more);
  }
  function end(failed) {
    draw();
    text.setAttribute("aria-busy", "false");
    route.end(failed);
  }
  function fail(message) {
    const note = make("p", "note", message);
    note.setAttribute("role", "alert");
    box.insertBefore(note, foot);
  }
  return { box, route, foot, write, think, end, fail };
}

// Stays at the end of the conversation, unless its reader scrolled up.
function follow(change) {
  const near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END_PX;
  change();
  if (near) talk.scrollTop = talk.scrollHeight;
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

function figures(usage, started, first, ended) {
  const parts = [];
  if (usage && first) {
    const tokens = usage.completion_tokens, seconds = (ended - first) / 1000;
    parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first) {
    const ms = first - started;
    parts.push(`first after ${ms < 950 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`}`);
  }
  return parts.join(" · ");
}

// Models without a chat template, as this gateway said; they go on writing the text.
const plain = new Set();

async function request(model, messages, signal) {
  const [path, said] = plain.has(model)
    ? ["v1/completions", { prompt: messages.map((each) => each.content).join(""), max_tokens: PLAIN_TOKENS }]
    : ["v1/chat/completions", { messages }];
  const body = { ...said, model, stream: true, cache_salt: salt,
    stream_options: { include_usage: true, include_route: true } };
  const response = await ask(path, { method: "POST", signal,
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.code !== "no_chat_template" || plain.has(model)) throw error;
  plain.add(model);
  return request(model, messages, signal);
}

async function stream(view, messages, signal) {
  const heard = { content: "", usage: null, finish: null, first: 0, plain: false };
  const model = models.value, response = await request(model, messages, signal);
  heard.plain = plain.has(model);
  let whole = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") { whole = true; continue; }
      take(view, heard, JSON.parse(data));
    }
    if (!whole) throw new Error("the gateway broke the answer off");
  } catch (error) {
    throw Object.assign(error, { heard });
  }
  return heard;
}

function take(view, heard, chunk) {
  if (chunk.error) throw new Error(String(chunk.error.message));
  if (chunk.usage) heard.usage = chunk.usage;
  if (chunk.route) follow(() => view.route.show(chunk.route));
  for (const choice of chunk.choices || []) {
    const { content, reasoning_content: thought } = choice.delta || { content: choice.text };
    if (choice.finish_reason) heard.finish = choice.finish_reason;
    if (!content && !thought) continue;
    if (!heard.first) view.route.flows();
    heard.first = heard.first || performance.now();
    if (thought) view.think(thought);
    if (content) { heard.content += content; view.write(content); }
  }
}

async function answer(asked) {
  const mine = conversation, at = mine.messages.length, started = performance.now();
  const view = answerView(), control = new AbortController();
  running = control;
  settle();
  talk.querySelectorAll(".again").forEach((each) => each.remove());
  talk.querySelectorAll(".route[open]").forEach((each) => { each.open = false; });
  talk.append(view.box);
  talk.scrollTop = talk.scrollHeight;
  let heard = null, failed = null;
  try {
    heard = await stream(view, [...mine.messages, asked], control.signal);
  } catch (error) {
    failed = error;
    heard = error.heard || { content: "", usage: null, first: 0 };
  }
  const ended = performance.now();
  if (heard.content) mine.messages.push(asked, { role: "assistant", content: heard.content });
  follow(() => finish());
  if (running === control) running = null;
  settle();

  function finish() {
    const parts = [figures(heard.usage, started, heard.first, ended)];
    if (heard.plain) parts.push("no chat model: it goes on writing your text");
    if (heard.finish === "length") parts.push("cut at the length limit");
    if (control.signal.aborted) parts.push("stopped");
    view.end(Boolean(failed));
    view.foot.textContent = parts.filter(Boolean).join(" · ");
    if (!failed) return;
    if (!control.signal.aborted) {
      view.fail(failed.message);
      if (failed.status === 401) showKey(true);
    }
    const again = make("button", "again", "Try again");
    again.type = "button";
    again.addEventListener("click", () => {
      if (running) return;
      mine.messages.length = at;
      view.box.remove();
      box.focus();
      answer(asked);
    });
    view.foot.append(again);
  }
}

function settle() {
  send.textContent = running ? "Stop" : "Send";
  send.classList.toggle("stop", Boolean(running));
  send.disabled = !running && !(ready && box.value.trim());
}

function grow() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function submit() {
  const text = box.value.trim();
  if (running || !text || send.disabled) return;
  box.value = "";
  grow();
  find("empty")?.remove();
  talk.append(make("p", "mine", text));
  answer({ role: "user", content: text });
}

send.addEventListener("click", () => { if (running) running.abort(); else submit(); box.focus(); });
box.addEventListener("input", () => { grow(); settle(); });
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.isComposing) running.abort();
});
const blank = find("empty");
find("new").addEventListener("click", () => {
  if (running) running.abort();
  running = null;
  conversation = { messages: [] };
  settle();
  talk.replaceChildren(blank);
  notice("");
  box.focus();
});
find("key").addEventListener("click", () => showKey(find("keybox").hidden));
find("keysave").addEventListener("click", useKey);
find("keyfield").addEventListener("keydown", (event) => { if (event.key === "Enter") useKey(); });

function useKey() {
  const text = find("keyfield").value.trim();
  if (!text) return;
  find("keyfield").value = "";
  keep(text);
  listModels();
}

if (matchMedia("(pointer: fine)").matches) box.focus();
listModels();
