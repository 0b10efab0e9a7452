// Chats and where they are kept: in this browser's own IndexedDB, or in this page alone. A chat is a
// tree: editing a message and asking again add a branch, and what was there before stays.

const NAME = "anabranch-chats";
const TITLE_CHARS = 60;

export function newChat({ system = "", temperature = null } = {}) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const now = Date.now();
  return { id, title: "", created: now, updated: now, system, temperature, nodes: [], leaf: -1 };
}

export function addNode(chat, parent, node) {
  chat.nodes.push({ ...node, parent });
  chat.leaf = chat.nodes.length - 1;
  if (!chat.title && node.role === "user") chat.title = titleOf(node.text);
  return chat.leaf;
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

// The places of the messages from the first to the leaf.
export function pathOf(chat, leaf = chat.leaf) {
  const found = [];
  for (let at = leaf; at >= 0; at = chat.nodes[at].parent) found.push(at);
  return found.reverse();
}

export function versionsOf(chat, place) {
  const { parent } = chat.nodes[place];
  return chat.nodes.flatMap((each, at) => (each.parent === parent ? [at] : []));
}

// Shows the branch of this message, as far as it was written on last.
export function turnTo(chat, place) {
  let leaf = place;
  for (let at = place + 1; at < chat.nodes.length; at += 1) if (chat.nodes[at].parent === leaf) leaf = newest(chat, leaf);
  chat.leaf = leaf;
}

function newest(chat, parent) {
  return chat.nodes.findLastIndex((each) => each.parent === parent);
}

// What a model is asked: an exchange without an answer is left out, with its question.
export function messagesOf(chat, leaf) {
  const asked = pathOf(chat, leaf).map((at) => chat.nodes[at]);
  const kept = asked.filter((each, at) => (each.role === "user" ? at === asked.length - 1 || asked[at + 1].text : each.text));
  const messages = kept.map(({ role, text }) => ({ role, content: text }));
  return chat.system ? [{ role: "system", content: chat.system }, ...messages] : messages;
}

export function asMarkdown(chat) {
  const parts = [`# ${chat.title || "Chat"}`];
  if (chat.system) parts.push(`> ${chat.system.replaceAll("\n", "\n> ")}`);
  for (const at of pathOf(chat)) {
    const { role, text, model } = chat.nodes[at];
    parts.push(role === "user" ? "## You" : `## ${model || "Answer"}`, text);
  }
  return `${parts.join("\n\n")}\n`;
}

function settled(request) {
  return new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
    request.onblocked = () => failed(new Error("another tab holds the chats"));
  });
}

// Two stores: a list needs titles alone.
export class Chats {
  static async open() {
    try {
      const asked = indexedDB.open(NAME, 1);
      asked.onupgradeneeded = () => {
        asked.result.createObjectStore("heads", { keyPath: "id" });
        asked.result.createObjectStore("bodies", { keyPath: "id" });
      };
      return new Chats(await settled(asked));
    } catch {
      return new Chats(null);
    }
  }

  constructor(db) {
    this.db = db;
    this.held = new Map(); // Where nothing is kept, or not to be.
  }

  async list() {
    const kept = this.db ? await settled(this.#store("heads", "readonly")) : [];
    const own = [...this.held.values()].map(headOf);
    return [...own, ...kept.filter((each) => !this.held.has(each.id))].sort((one, other) => other.updated - one.updated);
  }

  async read(id) {
    if (this.held.has(id)) return this.held.get(id);
    const made = this.db && this.db.transaction("bodies").objectStore("bodies").get(id);
    return made ? settled(made) : undefined;
  }

  // Raises where the browser has no room.
  async save(chat, keeps = true) {
    if (!this.db || !keeps) { this.held.set(chat.id, chat); return; }
    await this.#change((heads, bodies) => { heads.put(headOf(chat)); bodies.put(chat); });
    this.held.delete(chat.id);
  }

  async remove(id) {
    this.held.delete(id);
    if (this.db) await this.#change((heads, bodies) => { heads.delete(id); bodies.delete(id); });
  }

  async clear() {
    this.held.clear();
    if (this.db) await this.#change((heads, bodies) => { heads.clear(); bodies.clear(); });
  }

  #store(name, mode) {
    return this.db.transaction(name, mode).objectStore(name).getAll();
  }

  #change(what) {
    return new Promise((done, failed) => {
      const change = this.db.transaction(["heads", "bodies"], "readwrite");
      change.oncomplete = () => done();
      change.onabort = () => failed(change.error || new Error("the browser keeps no more"));
      what(change.objectStore("heads"), change.objectStore("bodies"));
    });
  }
}

const headOf = ({ id, title, created, updated }) => ({ id, title, created, updated });
