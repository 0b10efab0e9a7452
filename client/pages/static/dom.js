// What the scripts of all pages share: elements, and the clipboard.

export function make(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

// A browser lends its clipboard to pages of https and of this machine; others copy a selection.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* copied by a selection instead */ }
  const focused = document.activeElement, held = make("textarea", "unseen");
  held.value = text;
  (document.querySelector("dialog[open]") || document.body).append(held);
  held.select();
  const done = document.execCommand("copy");
  held.remove();
  focused?.focus();
  return done;
}
