"use strict";
// All that comes from people or models goes into the page by textContent: never as markup.
const byId = (id) => document.getElementById(id);
const element = (tag, text, more) => Object.assign(document.createElement(tag), { textContent: text, ...more });
const signed = (value, digits) => value.toFixed(digits).replace("-", "−");
const examples = JSON.parse(byId("examples-of").textContent);
let asked = 0; // answers to an older question are dropped

function say(field, message) {
  byId(`${field}-error`).textContent = message;
  byId(field).setAttribute("aria-invalid", Boolean(message));
}

async function request(model, question, context) {
  const headers = { "Content-Type": "application/json" };
  try {
    const reply = await fetch("/ask", { method: "POST", headers, body: JSON.stringify({ model, question, context }) });
    return { failed: !reply.ok, ...(await reply.json()) };
  } catch {
    return { failed: true, field: "form", message: "The app does not answer: it has ended, or is busy; try again." };
  }
}

async function ask(event) {
  event?.preventDefault();
  const turn = ++asked;
  const [question, context] = [byId("question").value, byId("context").value];
  const models = [byId("model"), byId("other")].filter((select) => select.value);
  for (const field of ["model", "context", "question", "form"]) say(field, "");
  Object.assign(byId("ask"), { disabled: true, textContent: "Asking …" });
  const replies = await Promise.all(models.map((select) => request(select.value, question, context)));
  if (turn !== asked) return;
  Object.assign(byId("ask"), { disabled: false, textContent: "Ask" });
  const failed = replies.find((reply) => reply.failed);
  if (failed) {
    byId("results").replaceChildren();
    say(failed.field, failed.message);
    byId(failed.field).focus();
    return;
  }
  byId("results").replaceChildren(...replies.map((reply, i) => card(reply, models[i].selectedOptions[0], context)));
  // Below the form, on a narrow page, nobody would see it.
  if (document.querySelector(".answer").getBoundingClientRect().bottom > innerHeight) byId("results").scrollIntoView();
}

function card(reply, option, context) {
  const node = byId("card").content.cloneNode(true).firstElementChild;
  const part = (selector) => node.querySelector(selector);
  part(".name").textContent = option.text;
  const { wait, ...spent } = reply.ms;
  const all = Object.values(spent).reduce((sum, ms) => sum + ms);
  const times = Object.entries({ ...spent, "in all": all }).map(([name, ms]) => `${name} ${ms.toFixed(1)} ms`);
  part(".latency").textContent = times.join(" · ");
  const cut = reply.windows > 1 ? `Cut into ${reply.windows} windows` : "One window";
  const waited = wait < 1 ? "" : ` · waited ${wait.toFixed(0)} ms`;
  const together = reply.together > 1 ? ` · answered together with ${reply.together - 1} others` : "";
  part(".windows").textContent = `${cut} of at most ${reply.window_tokens} tokens${waited}${together}`;
  const seen = new Set();
  const nbest = reply.nbest.map(trimmed).filter(({ text }) => !seen.has(text) && seen.add(text));
  for (const entry of nbest) {
    const percent = entry.probability < 0.001 ? "< 0.1 %" : `${(100 * entry.probability).toFixed(1)} %`;
    const show = { title: "Show its place", onclick: () => mark(part(".paragraph"), context, entry) };
    const row = part(".nbest tbody").insertRow();
    row.insertCell().append(entry.text ? element("button", entry.text, show) : element("em", "no answer"));
    for (const text of [signed(entry.score, 2), percent]) row.append(element("td", text, { className: "number" }));
  }
  const [slider, best, own] = [part("input"), nbest.find((entry) => entry.text), Number(option.dataset.threshold)];
  slider.max = Math.max(10, Math.ceil(Math.abs(reply.margin ?? 0)) + 1); // beyond the margin: both answers can be had
  slider.min = -slider.max;
  slider.value = own || 0;
  part(".own").textContent = Number.isNaN(own)
    ? "It starts at 0: where this model’s F1 is best, no record says."
    : "It starts where this model’s F1 was best, on the questions that its run was scored on.";
  slider.addEventListener("input", () => decide(part, reply, best, context));
  decide(part, reply, best, context);
  return node;
}

/** Where the threshold stands: that acts on what is here already, and nothing is asked again. */
function decide(part, reply, best, context) {
  const threshold = Number(part("input").value);
  part("output").textContent = signed(threshold, 1);
  const none = !best || reply.margin > threshold;
  part(".answer").textContent = none ? "No answer" : best.text;
  part(".answer").classList.toggle("none", none);
  const [margin, over] = [reply.margin, reply.margin - threshold].map((value) => Math.abs(value).toFixed(2));
  const place = `“No answer” scores ${margin} ${reply.margin > 0 ? "above" : "below"} the best span`;
  const text = `${place}: ${over} ${none ? "over" : "under"} the threshold.`;
  part(".margin").textContent = best ? text : "No span of this paragraph may be an answer.";
  mark(part(".paragraph"), context, none ? {} : best);
}

/** A span without the punctuation around it, which the scores do not count either. */
function trimmed({ text, begin, end, ...rest }) {
  const [front, back] = [/^[\s,.;:]+(?=.)/, /[\s,;:]+$/].map((around) => text.match(around)?.[0].length ?? 0);
  return { ...rest, text: text.slice(front, text.length - back), begin: begin + front, end: end && end - back };
}

/** The paragraph with one entry's characters marked; they are counted in code points, strings here are not. */
function mark(box, context, { begin, end }) {
  const characters = Array.from(context);
  if (!end) return box.replaceChildren(context);
  const found = element("mark", characters.slice(begin, end).join(""));
  box.replaceChildren(characters.slice(0, begin).join(""), found, characters.slice(end).join(""));
  box.scrollTop = found.offsetTop - box.offsetTop - box.clientHeight / 2;
}

function fill({ question, context }) {
  [byId("question").value, byId("context").value] = [question, context];
}

function offerExamples() {
  const kind = byId("model").selectedOptions[0]?.dataset.examples;
  byId("tiny").hidden = kind !== "synthetic";
  const suited = examples[kind] ?? [];
  const chip = (example) => element("button", example.name, { type: "button", onclick: () => ask(fill(example)) });
  byId("examples").replaceChildren(...suited.map(chip));
  const ours = ["", ...Object.values(examples).flatMap((all) => all.map(({ context }) => context))];
  if (suited.length && ours.includes(byId("context").value)) fill(suited[0]); // over nothing of the user's
}

byId("form").addEventListener("submit", ask);
byId("model").addEventListener("change", offerExamples);
byId("context").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").click();
});
offerExamples();
